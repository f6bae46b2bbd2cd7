"""Shards of a flat buffer made whole, and whole buffers reduced to shards, as its layout has them.

Shards of one length are gathered and reduced in one collective. Where a layout's shards are as long as what each rank
owns (`FlatLayout.owners`), each owner broadcasts its own, and a reduction is an all-reduce of which each rank keeps
what it owns: that sends up to twice as much as a reduce-scatter of the same bytes, and less than one of a buffer that
is mostly padding.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.zero.buffers.layout import FlatLayout


def gather_shards(comm: Communicator, layout: FlatLayout, full: Tensor, own: Tensor) -> Work:
    """Start to make ``full [padded_numel]`` of every rank's ``own``, which may be its part of ``full``. Collective."""
    if layout.owners is None:
        return comm.all_gather(full, own)
    start, stop = layout.interval(comm.rank)
    if stop > start and own.data_ptr() != full[start:stop].data_ptr():
        full[start:stop].copy_(own)
    return _All([comm.broadcast(full[first:last], src=rank) for rank, first, last in layout.owners])


def reduce_shards(comm: Communicator, layout: FlatLayout, target: Tensor, local: Tensor) -> Work:
    """Start to make ``target`` this rank's part of the sum of all ``local [padded_numel]``. Collective.

    ``target`` may be that part of ``local``, which is scratch.
    """
    if layout.owners is None:
        return comm.reduce_scatter(target, local)
    start, stop = layout.interval(comm.rank)
    return _Kept(comm.all_reduce(local), target, local[start:stop])


class _All:
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


class _Kept:
    """An operation after which a part of what it wrote is copied."""

    def __init__(self, work: Work, target: Tensor, part: Tensor) -> None:
        self._work, self._target, self._part = work, target, part

    def wait(self) -> None:
        """Wait, and copy once."""
        self._work.wait()
        if self._part.numel() and self._target.data_ptr() != self._part.data_ptr():
            self._target.copy_(self._part)
        self._part = self._target
