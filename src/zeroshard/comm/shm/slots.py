"""How the ranks of one host pass data to each other: copied through slots, or read in place.

Each rank owns a segment of shared memory that the others map. There are two ways. Either a rank *publishes* data: it
copies a piece into the next of a few slots and announces it in a counter, and the others read it there. Or, if every
rank's tensor was allocated in its own segment (`Arena`), each rank *offers* its tensor: it announces where the tensor
lies, and the others read it in place until all have called `done`.

[Note: four slots need no second counter] A rank that publishes piece n has read piece n - 2 of every rank. Each of
those published piece n - 2 after it had read piece n - 4, whose slot piece n now takes. So no slot is overwritten while
another rank still reads it.

[Note: one note is enough for offers] A rank writes its next offer only after every rank has read the last one. Either
all ranks have called `done` for that offer. Or slots were used instead, and all ranks have published a piece, which
they do after they have read the offers.

[Note: nobody reads what is not meant] With each offer and each piece a rank writes its topic: a number that identifies
the operation to which the data belong. A rank that finds another topic than its own raises instead of reading.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from zeroshard.comm.base import PeerError
from zeroshard.comm.queued.pieces import lies_in_order
from zeroshard.comm.shm.arena import Arena, MappedArena, Place
from zeroshard.comm.shm.mapped import LOST, NOTE_WORDS, PeerLost, Segment

SLOT_BYTES = 1 << 20
_AHEAD = 1  # by so many pieces publishing runs ahead of reading
NUM_SLOTS = 2 * (_AHEAD + 1)  # [Note: four slots need no second counter]
_PUBLISHED, _OFFERED, _DONE = LOST + 1, LOST + 2, LOST + 3  # counters: pieces published, offers made, offers finished
NUM_COUNTERS = LOST + 4

Publish = Callable[[int, Tensor], None]  # copies piece number i into this rank's slot
Read = Callable[[int, list[Tensor]], None]  # reads piece number i from the slots, listed by rank
_NOWHERE = Place(0, 0, 0)
# Layout of a segment's note, in words: the place that is offered, the topic of the offer, the topic of each slot.
_OFFER_TOPIC = len(_NOWHERE)
_SLOT_TOPICS = _OFFER_TOPIC + 1
assert _SLOT_TOPICS + NUM_SLOTS <= NOTE_WORDS


class Slots:
    """The segments of all ranks. All ranks publish and offer in the same order, so a rank's own counts hold for all.

    Args:
        segments: the ranks' segments, by rank; empty in a world of one.
        rank: this rank, whose segment is ``segments[rank]``.
        timeout_s: seconds after which a rank that does not answer counts as lost.

    Attributes:
        topic: topic of the operation that runs now: [Note: nobody reads what is not meant].
    """

    def __init__(self, segments: list[Segment], rank: int, timeout_s: float) -> None:
        self.ranks = range(max(len(segments), 1))
        self.peers = [r for r in self.ranks if r != rank]
        self._rank = rank
        self._segments = segments
        self._timeout_s = timeout_s
        self.topic = 0
        self._num_published = self._num_read = self._num_offers = self._num_done = 0
        self.arena = Arena(segments[rank]) if segments else None
        self._neighbours = [MappedArena(segment) for segment in segments]
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    def numel(self, dtype: torch.dtype) -> int:
        """Return how many elements of ``dtype`` fit into a slot."""
        return SLOT_BYTES // dtype.itemsize

    def exchange(self, dtype: torch.dtype, num_pieces: int, publish: Publish, read: Read) -> None:
        """Publish pieces 0, 1, ... and read each one as soon as all ranks have published it.

        Raises:
            PeerError: a rank is gone, does not answer, or runs another operation.
        """
        if not self._segments:
            return
        try:
            for index in range(num_pieces + _AHEAD):
                if index < num_pieces:
                    self._publish(dtype, lambda slot, piece=index: publish(piece, slot))
                if index >= _AHEAD:
                    self._read(dtype, lambda slots, piece=index - _AHEAD: read(piece, slots))
        except PeerLost as error:
            self._tell(error)
            raise

    def offer(self, tensor: Tensor) -> list[Tensor] | None:
        """Offer ``tensor`` (1-D, same dtype and numel on all ranks) and return every rank's, to be read until `done`.

        Returns None if the tensor of any rank is not in its arena. Then `exchange` at least one piece before the next
        offer: [Note: one note is enough for offers].

        Raises:
            PeerError: a rank is gone, does not answer, or runs another operation.
        """
        assert self.arena is not None
        place = self.arena.place_of(tensor) if lies_in_order(tensor) else None
        own, self._num_offers = self._segments[self._rank], self._num_offers + 1
        for word, number in enumerate(place or _NOWHERE):
            own.note[word] = number
        own.note[_OFFER_TOPIC] = self.topic
        own.counters[_OFFERED].advance(self._num_offers)
        places = []
        try:
            for peer in self.ranks:
                if peer != self._rank:
                    self._segments[peer].counters[_OFFERED].wait(self._num_offers, self._timeout_s)
                    self._require_topic(peer, _OFFER_TOPIC)
                start, num_bytes, offset = self._segments[peer].note[:3]
                places.append(Place(start, num_bytes, offset))
        except PeerLost as error:
            self._tell(error)
            raise
        if _NOWHERE in places:
            return None
        views = [n.view(at, tensor.numel(), tensor.dtype) for n, at in zip(self._neighbours, places, strict=True)]
        views[self._rank] = tensor
        return views

    def done(self) -> None:
        """Announce that this rank has finished its reads and writes of the offer; return when every rank has.

        Raises:
            PeerError: a rank is gone or does not answer.
        """
        self._num_done += 1
        self._segments[self._rank].counters[_DONE].advance(self._num_done)
        try:
            for peer in self.peers:
                self._segments[peer].counters[_DONE].wait(self._num_done, self._timeout_s)
        except PeerLost as error:
            self._tell(error)
            raise

    def _tell(self, error: PeerLost) -> None:
        """Write the rank that is lost into our counter `LOST`, where the others see it."""
        self._segments[self._rank].counters[LOST].advance(error.rank + 1)

    def _publish(self, dtype: torch.dtype, publish: Callable[[Tensor], None]) -> None:
        count = self._num_published
        publish(self._slots(dtype, count)[self._rank])
        self._segments[self._rank].note[_SLOT_TOPICS + count % NUM_SLOTS] = self.topic
        self._num_published = count + 1
        self._segments[self._rank].counters[_PUBLISHED].advance(count + 1)

    def _read(self, dtype: torch.dtype, read: Callable[[list[Tensor]], None]) -> None:
        count = self._num_read
        for peer in self.peers:
            self._segments[peer].counters[_PUBLISHED].wait(count + 1, self._timeout_s)
            self._require_topic(peer, _SLOT_TOPICS + count % NUM_SLOTS)
        read(self._slots(dtype, count))
        self._num_read = count + 1

    def _require_topic(self, peer: int, word: int) -> None:
        if self._segments[peer].note[word] != self.topic:
            raise PeerError(f"rank {self._segments[peer].rank} called a different collective than this rank")

    def _slots(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return every rank's slot for publication number ``count``, listed by rank."""
        views = self._views.get(dtype)
        if views is None:
            by_segment = [segment.data.view(dtype).view(NUM_SLOTS, -1) for segment in self._segments]
            views = self._views[dtype] = [[rows[slot] for rows in by_segment] for slot in range(NUM_SLOTS)]
        return views[count % NUM_SLOTS]

    def close(self) -> None:
        """Close the segments; the memory is freed with the last tensor that views it."""
        for segment in self._segments:
            segment.close()
