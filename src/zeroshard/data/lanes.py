"""Tables as a stream of tokens that many ranks read together: which documents come next, and which rank encodes them.

    parts of an epoch, shuffled   p0 p1 p2 p3 ...         dealt out to `NUM_LANES` lanes in turn, like cards
    lane l                        pl, pl+L, pl+2L ...     read one after another
    a turn                        each lane's next documents: complete ones, with a given size of text or a little more

The documents of a lane's turn depend only on the lane's place (how many of its parts and documents are already read),
so any rank that encodes them makes the same ids. Rank ``r`` of ``W`` encodes lanes ``r``, ``r + W`` ..., and a gather
of bytes gives every rank all ids of the turn: two or four bytes per token, far less than the gradients. So each
document is fetched and encoded once per world, at most one turn before it is needed.

Ranks beyond the number of lanes encode nothing.
"""

from __future__ import annotations

import hashlib
import json
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from zeroshard.data import order
from zeroshard.data.files import patiently, suffix_of
from zeroshard.data.joining import document_ids
from zeroshard.data.meta import DTYPES, dtype_for
from zeroshard.data.split import MANY_DOCUMENTS, Holdout
from zeroshard.data.tables import Part, PartReader, Tables, corpus_identity, count_documents
from zeroshard.data.tokenizer import Tokenizer
from zeroshard.host.errors import UserError

NUM_LANES = 16  # parts that a turn mixes; each is an open file of the rank that reads it
READ_THREADS = 2  # threads per rank that read and encode ahead
_RULE = "stream-1"  # version of the way in which documents become rows; part of identities
_HEAD = struct.Struct("<4q")  # lane; bytes of ids; the place after them (-1: end of the lane)
_DONE, _FAILED = b"\0", b"\1"

Ids = NDArray[np.unsignedinteger]
Gather = Callable[[bytes], list[bytes]]


class Place(NamedTuple):
    """A position in a lane: the number of its parts already read, and of documents already read in the next part."""

    part: int
    document: int


Places = tuple[Place | None, ...]  # one per lane; None: the lane has no more documents in this epoch


@dataclass(frozen=True)
class StreamedText:
    """A corpus that is read during training, as it is needed."""

    parts: tuple[Part, ...]  # all parts, in order
    tokenizer: Tokenizer  # the tokenizer that makes ids
    column: str  # the column that contains the text
    holdout: Holdout  # the rule that decides which documents validate
    identity: str  # a hash of everything that decides the tokens of the stream

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """The dtype of ids."""
        return DTYPES[dtype_for(self.tokenizer.vocab_size)]


def open_stream(tables: Tables, tokenizer: Tokenizer, tokenizer_identity: str, val_fraction: float) -> StreamedText:
    """Open every file and cut it into parts; reads a few documents.

    Raises:
        UserError: a file is compressed lines, which can only be read from front to back; or a file cannot be read.
    """
    for file in tables.files:
        if suffix_of(file.path) in (".gz", ".zst"):
            todo = "use `zeroshard prepare`, or write it as .parquet"
            raise UserError("data.streaming", f"{file.path} can only be read from its beginning", todo)
    parts = tuple(tables.parts())
    holdout = Holdout(val_fraction, count_documents(tables, MANY_DOCUMENTS))
    text = [corpus_identity(tables.files), tables.column, tokenizer_identity, val_fraction, len(parts)]
    choices = [_RULE, holdout.rule, tokenizer.around, *text]
    identity = hashlib.sha256(json.dumps(choices).encode()).hexdigest()
    return StreamedText(parts, tokenizer, tables.column, holdout, identity)


class Lanes:
    """The lanes of one split, and this rank's share of reading and encoding them.

    Args:
        split: ``train`` or ``val``; documents of the other split are skipped.
        seed: seed for the order of parts.
        gather: a collective that returns every rank's bytes in rank order. None: each rank encodes everything.
    """

    def __init__(
        self,
        text: StreamedText,
        split: str,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        gather: Gather | None = None,
    ) -> None:
        self._text, self._split, self._seed, self._gather = text, split, seed, gather
        self._own = range(NUM_LANES) if gather is None else range(rank, NUM_LANES, world_size)
        self._lanes: dict[tuple[int, int], _Lane] = {}  # by epoch and number
        self._ahead: dict[tuple[int, int, Place, int], Future[tuple[Ids, Place | None]]] = {}
        self._pool = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="stream")

    def start(self) -> Places:
        """Return the places at which an epoch begins."""
        return tuple(Place(0, 0) if number < len(self._text.parts) else None for number in range(NUM_LANES))

    def has(self, places: Places) -> bool:
        """Whether ``places`` are one for each lane, each in a part that its lane has."""
        num_parts = [len(range(number, len(self._text.parts), NUM_LANES)) for number in range(NUM_LANES)]
        return len(places) == NUM_LANES and all(
            place is None or place.part < count for place, count in zip(places, num_parts, strict=True)
        )

    def read_ahead(self, epoch: int, places: Places, num_bytes: int) -> None:
        """Begin to encode this rank's share of a turn; cancel reads that were begun for other turns."""
        wanted = [(epoch, number, place, num_bytes) for number in self._own if (place := places[number]) is not None]
        for key in self._ahead.keys() - set(wanted):
            self._ahead.pop(key).cancel()
        for key in self._lanes.keys() - {(epoch, number) for _, number, _, _ in wanted}:
            self._lanes.pop(key).close()
        for key in wanted:
            if key not in self._ahead:
                lane = self._lanes.setdefault(key[:2], _Lane(self._text, self._split, self._parts(*key[:2])))
                self._ahead[key] = self._pool.submit(lane.read, *key[2:])

    def take(self, epoch: int, places: Places, num_bytes: int) -> tuple[Ids, Places]:
        """Return the ids of a turn, [n], and the places after it. Collective if there is a ``gather``.

        Raises:
            UserError: a file failed on any rank; raised on every rank.
        """
        self.read_ahead(epoch, places, num_bytes)
        failure: Exception | None = None
        message = _DONE
        try:
            for (_, number, _, _), future in sorted(self._ahead.items(), key=lambda item: item[0][1]):
                message += _packed(number, *future.result())
        except Exception as error:  # noqa: BLE001 -- raised below, once the other ranks know
            failure = error
            described = "", f"{type(error).__name__}: {error}", ""
            if isinstance(error, UserError):
                described = error.field, error.what, error.todo
            message = _FAILED + json.dumps(described).encode()
        self._ahead.clear()
        try:
            messages = self._gather(message) if self._gather else [message]
        finally:  # a peer that is lost does not hide this rank's own error
            if failure is not None:
                raise failure
        found: dict[int, tuple[Ids, Place | None]] = {}
        for each in messages:
            if each[:1] == _FAILED:
                field, what, todo = json.loads(each[1:])
                raise UserError(field, what, todo) if field else RuntimeError(f"another rank failed: {what}")
            found |= _lanes_in(each, self._text.dtype)
        ids = [found[number][0] for number in sorted(found)]
        after = tuple(found[number][1] if number in found else None for number in range(NUM_LANES))
        return np.concatenate([np.empty(0, self._text.dtype), *ids]), after

    def close(self) -> None:
        """Release threads and files; does not wait for reads in progress."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        for lane in self._lanes.values():
            lane.close()
        self._lanes.clear()
        self._ahead.clear()

    def _parts(self, epoch: int, number: int) -> list[Part]:
        """Return a lane's parts, in the order in which it reads them in this epoch."""
        parts = self._text.parts
        dealt = np.arange(number, len(parts), NUM_LANES) + epoch * len(parts)
        return [parts[place] for place in order.rows(self._seed, dealt, len(parts)).tolist()]


class _Lane:
    """Reads one lane of one epoch; continues from its current place, or seeks to the place that is asked for."""

    def __init__(self, text: StreamedText, split: str, parts: Sequence[Part]) -> None:
        self._text, self._split, self._parts = text, split, parts
        self._reader = PartReader(text.column)
        self._texts: Iterator[str] = iter(())
        self._at: Place | None = None
        self._lock, self._closed = threading.Lock(), False

    def read(self, place: Place, num_bytes: int) -> tuple[Ids, Place | None]:
        """Read documents from ``place`` on until they have ``num_bytes`` of text; return ids and the place after them.

        A character counts as one byte here.

        Raises:
            UserError: a file failed.
        """
        pieces: list[Ids] = [np.empty(0, self._text.dtype)]
        at: Place | None = place
        with self._lock:
            try:
                while at is not None and num_bytes > 0:
                    path = self._parts[at.part].file.path
                    more = patiently(lambda at=at, left=num_bytes: self._from_part(at, left), path, _AGAIN)
                    pieces += more.pieces
                    num_bytes -= more.num_bytes
                    at = self._at = more.place
            finally:
                if at is None or self._closed:
                    self._let_go()
        return np.concatenate(pieces), at

    def close(self) -> None:
        """Close the file, at once or when the read in progress ends."""
        self._closed = True
        if self._lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self._lock.release()

    def _from_part(self, place: Place, num_bytes: int) -> _Read:
        part, document = place
        try:
            if place != self._at or document == 0:
                self._at = None
                self._texts = self._reader.texts(self._parts[part])
                for _ in islice(self._texts, document):
                    pass
            pieces: list[Ids] = []
            held = 0
            while held < num_bytes:
                text = next(self._texts, None)
                if text is None:
                    after = Place(part + 1, 0) if part + 1 < len(self._parts) else None
                    return _Read(pieces, held, after)
                document += 1
                for split, side in self._text.holdout.texts(text):
                    if split == self._split:
                        pieces.append(document_ids(self._text.tokenizer, side).astype(self._text.dtype))
                        held += len(side)
        except BaseException:
            self._let_go()  # a retry opens the file again
            raise
        return _Read(pieces, held, Place(part, document))

    def _let_go(self) -> None:
        self._at, self._texts = None, iter(())
        self._reader.close()


class _Read(NamedTuple):
    """Documents of one part, the size of their text, and the place after them."""

    pieces: list[Ids]
    num_bytes: int
    place: Place | None


_AGAIN = "start again with --resume auto"


def _packed(number: int, ids: Ids, place: Place | None) -> bytes:
    return _HEAD.pack(number, ids.nbytes, *(place or (-1, -1))) + ids.tobytes()


def _lanes_in(message: bytes, dtype: np.dtype[np.unsignedinteger]) -> dict[int, tuple[Ids, Place | None]]:
    """Return the lanes that `_packed` put into a message, by number: their ids and the places after them."""
    found, at = {}, len(_DONE)
    while at < len(message):
        number, num_bytes, part, document = _HEAD.unpack_from(message, at)
        at += _HEAD.size
        ids = np.frombuffer(message, dtype, num_bytes // dtype.itemsize, at)
        found[number] = ids, Place(part, document) if part >= 0 else None
        at += num_bytes
    return found
