"""This rank's own part of unsharded weights, at stage 3: where it can, a parameter is a view of the master weights.

A gather fetches the shards of all ranks. One of them is this rank's own, and lies in its memory already: the master
weights. If these have the compute dtype, a parameter that lies in this shard as a whole is shown as a view of the
master, and the gather leaves the shard out (`zeroshard.comm.all_gather_others`). Parameters that lie in several shards
need all their elements in one place, so their pieces of this shard are copied. On two ranks this saves about a third of
what a gather copies, on more ranks less. A shard must begin in the buffer at a multiple of 64 bytes, as it does in the
master, because bits of a product may depend on how its factors are aligned.

Inside `Zero.full_params` writes into weights may be dropped, so there parameters are views of the gathered buffer, with
a copy of this shard.
"""

from __future__ import annotations

from torch import Tensor

from zeroshard.zero.buffers.layout import FlatLayout, view_of

ALIGNMENT = 64  # bytes, of which memory for tensors begins at a multiple


class OwnWeights:
    """The views of one buffer's master weights.

    Args:
        layout: layout of the buffer.
        rank: this rank among those that hold the shards.
        master: ``[shard_numel]``: the rank's shard, in the compute dtype.
    """

    def __init__(self, layout: FlatLayout, rank: int, master: Tensor) -> None:
        self._start, self._stop = layout.interval(rank)
        self._master = master
        self._views: dict[int, Tensor] = {}  # by slot
        self._cut: list[slice] = []  # of the buffer: pieces of parameters that lie in several shards
        for index, slot in enumerate(layout.slots):
            first, last = max(slot.offset, self._start), min(slot.offset + slot.numel, self._stop)
            if last - first == slot.numel:
                self._views[index] = view_of(master, first - self._start, slot.shape)
            elif last > first:
                self._cut.append(slice(first, last))

    def instead_of(self, views: list[Tensor]) -> list[Tensor]:
        """``views``, each parameter in the gathered buffer, with those in the master in the place of some."""
        return [self._views.get(index, view) for index, view in enumerate(views)]

    def copy_cut(self, full: Tensor) -> None:
        """Copy the pieces that cannot be read in the master into ``full [padded_numel]``."""
        for piece in self._cut:
            full[piece].copy_(self._in_master(piece))

    def take_cut(self, full: Tensor) -> None:
        """Copy these pieces of ``full``, into which the user has written, back."""
        for piece in self._cut:
            self._in_master(piece).copy_(full[piece])

    def copy(self, full: Tensor) -> None:
        """Copy all of the shard into ``full``."""
        full[self._start : self._stop].copy_(self._master)

    def _in_master(self, piece: slice) -> Tensor:
        return self._master[piece.start - self._start : piece.stop - self._start]
