"""The all-gather and the reduce-scatter of a flat buffer, for layouts with shards of equal or of different lengths.

If all shards have one length, each is one collective. If a shard is as long as the tensors that its rank owns
(`FlatLayout.owners`), each owner broadcasts its shard, and a reduction is an all-reduce of which each rank keeps its
shard. That sends up to twice the bytes of a reduce-scatter of the same buffer, and fewer than a reduce-scatter of a
buffer padded to equal shards, which would be mostly padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroshard.comm import Communicator, Work, reduce_scatter_consuming
from zeroshard.zero.core.layout import FlatLayout


def gather_shards(comm: Communicator, layout: FlatLayout, full: Tensor, own: Tensor) -> Work:
    """Start to gather every rank's shard ``own`` into ``full [padded_numel]``. Collective.

    ``own`` may be this rank's slice of ``full``.
    """
    if layout.owners is None:
        return comm.all_gather(full, own)
    start, stop = layout.interval(comm.rank)
    if stop > start and own.data_ptr() != full[start:stop].data_ptr():
        full[start:stop].copy_(own)
    return _All([comm.broadcast(full[first:last], src=rank) for rank, first, last in layout.owners])


def reduce_shards(comm: Communicator, layout: FlatLayout, target: Tensor, local: Tensor) -> Work:
    """Start to reduce all ranks' ``local [padded_numel]`` into ``target``, this rank's shard of the sum. Collective.

    ``target`` may be that shard of ``local``. The values of ``local`` are undefined afterwards.
    """
    if layout.owners is None:
        return reduce_scatter_consuming(comm, target, local)
    start, stop = layout.interval(comm.rank)
    return _Kept(comm.all_reduce(local), target, local[start:stop])


class _All:
    """The handle of several operations."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


class _Kept:
    """The handle of an all-reduce, after which this rank's shard is copied to ``target``."""

    def __init__(self, work: Work, target: Tensor, part: Tensor) -> None:
        self._work, self._target, self._part = work, target, part

    def wait(self) -> None:
        """Wait, and copy once."""
        self._work.wait()
        if self._part.numel() and self._target.data_ptr() != self._part.data_ptr():
            self._target.copy_(self._part)
        self._part = self._target
