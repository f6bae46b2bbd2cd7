"""Layouts of flat buffers in which each tensor lies on one rank, for optimizers that look at whole tensors.

No slot crosses the border of a shard. Tensors are assigned to shards, the largest first, each to the shard with the
least so far, and all shards are as long as the longest::

    slot 0               slot 2   slot 1
    |--------------------|--------|-----------|........|          . padding
    |       rank 0       |       rank 1       |  ...

So the longest shard is at most 4/3 of the shortest possible (`zeroshard.zero.whole_tensors.balance`), which is at least
the largest tensor. A buffer with few tensors on many ranks would be mostly padding. There each shard is only as long as
what its rank owns, and most ranks own nothing (`Uneven`). Each owner broadcasts its shard, and a
reduction is an all-reduce of which each rank keeps its shard. That sends up to twice the bytes of a reduce-scatter of
the same buffer, and fewer than a reduce-scatter of a buffer padded to equal shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from zeroshard.comm import Communicator, Work
from zeroshard.comm.base import AllOf
from zeroshard.optim.classes.reach import OptimizerKind, Reach
from zeroshard.optim.classes.requirements import classify
from zeroshard.settings import rules
from zeroshard.zero.buffers.unit import LaysOut
from zeroshard.zero.core.layout import ALIGNMENT, WHOLE, FlatLayout, Slot
from zeroshard.zero.whole_tensors.balance import largest_first

MOSTLY_PADDING = 4
"""A buffer of whole tensors that would be longer than its parameters by more than this factor may have shards of
different lengths."""

WHOLE_ALIGNMENT = 16
"""Elements to which whole tensors are aligned: 64 bytes of fp32. The alignment of a tensor decides which matrix kernel
runs, and kernels sum in different orders. So a tensor must have the same alignment in every buffer to have the same
bits at each stage."""


@dataclass(frozen=True)
class Uneven:
    """Shards that are only as long as what their ranks own: `zeroshard.zero.core.layout.UnevenShards`."""

    world_size: int
    intervals: tuple[tuple[int, int, int], ...]  # ``(rank, start, stop)`` of each rank that owns something, in order

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return aligned(self.intervals[-1][2], self.world_size) if self.intervals else 0  # any group's size divides it

    @cached_property
    def _by_rank(self) -> dict[int, tuple[int, int]]:
        return {rank: (start, stop) for rank, start, stop in self.intervals}

    def interval(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of ``rank``'s shard in the flat buffer; (0, 0) if it owns nothing."""
        return self._by_rank.get(rank, (0, 0))

    def gather(self, comm: Communicator, full: Tensor, own: Tensor) -> Work:
        """Start to gather every rank's shard ``own`` into ``full [padded_numel]``, of which ``own`` may be a slice."""
        start, stop = self.interval(comm.rank)
        if stop > start and own.data_ptr() != full[start:stop].data_ptr():
            full[start:stop].copy_(own)
        return AllOf([comm.broadcast(full[first:last], src=rank) for rank, first, last in self.intervals])

    def reduce(self, comm: Communicator, target: Tensor, local: Tensor) -> Work:
        """Start to sum all ranks' ``local [padded_numel]``, this rank's shard of the sum into ``target``."""
        start, stop = self.interval(comm.rank)
        return _Kept(comm.all_reduce(local), target, local[start:stop])


def add_loads(layout: FlatLayout, loads: list[int]) -> None:
    """Add the elements of the tensors that each part of each rank owns to its entry of ``loads``."""
    for slot in (slot for slot in layout.slots if slot.numel):
        owner = slot.offset // layout.part_numel
        if isinstance(layout.uneven, Uneven):
            owner = next(rank for rank, start, stop in layout.uneven.intervals if start <= slot.offset < stop)
        loads[owner] += slot.numel


def whole_layout(
    shapes: Iterable[tuple[str, Sequence[int]]],
    world_size: int,
    loads: Sequence[int] = (),
    *,
    even: bool = True,
    parts: int = 1,
) -> FlatLayout:
    """Lay out parameters ``(name, shape)`` so that each lies in one part of one shard.

    Args:
        shapes: names and shapes of the parameters.
        world_size: number of shards.
        loads: elements that each part of each rank owns in other buffers. Of parts that own equally much of this
            buffer, the one that owns least of the others is next, so that not every buffer's largest tensor goes to
            the same rank.
        even: whether shards must have one length. If not, and if the buffer would be over `MOSTLY_PADDING` times as
            long as its parameters, each shard is only as long as what its rank owns.
        parts: see `FlatLayout`.
    """
    rules.check_count("world_size", world_size)
    rules.check_count("parts", parts)
    slots = [Slot(name, tuple(shape), 0) for name, shape in shapes]
    owners = balance([slot.numel for slot in slots], list(loads) or [0] * (world_size * parts))
    filled = [0] * (world_size * parts)
    starts = []
    for slot, owner in zip(slots, owners, strict=True):
        starts.append(filled[owner])
        filled[owner] += aligned(slot.numel, WHOLE_ALIGNMENT)
    longest, intervals = max(filled), None
    begins: dict[int, int] = {}
    if not even and longest * world_size > MOSTLY_PADDING * sum(filled):
        ranks = [rank for rank, numel in enumerate(filled) if numel]
        ends = list(itertools.accumulate(filled[rank] for rank in ranks))
        intervals = tuple((rank, end - filled[rank], end) for rank, end in zip(ranks, ends, strict=True))
        begins = {rank: start for rank, start, _ in intervals}
    placed = zip(slots, owners, starts, strict=True)
    return FlatLayout(
        tuple(Slot(s.name, s.shape, begins.get(owner, owner * longest) + start) for s, owner, start in placed),
        world_size,
        parts=parts,
        longest=longest * parts,
        uneven=None if intervals is None else Uneven(world_size, intervals),
    )


def balanced(loads: list[int]) -> LaysOut:
    """Return `whole_layout` as `Unit.lay_out_anew` calls it; each layout's elements are added to ``loads``."""

    def lay_out(shapes: Sequence[tuple[str, Sequence[int]]], world_size: int, even: bool, parts: int) -> FlatLayout:
        layout = whole_layout(shapes, world_size, loads, even=even, parts=parts)
        add_loads(layout, loads)
        return layout

    return lay_out


def in_blocks(block: int) -> LaysOut:
    """Return the layout that keeps blocks of parameters, as `Unit.lay_out_anew` calls it."""
    return lambda shapes, world_size, _, parts: FlatLayout.of(shapes, world_size, ALIGNMENT, parts, block)


def balance(numels: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the shard of each tensor: the largest is placed first, each in the shard that has least; ties by order.

    Args:
        numels: elements of each tensor.
        loads: elements of each shard in other buffers; they decide between shards that have equally much here.
    """
    if len(loads) > len(numels):  # there are no more owners than tensors: those with the least load
        chosen = sorted(np.argsort(np.asarray(loads), kind="stable")[: len(numels)].tolist())
        if len(chosen) < len(loads) and chosen:
            return [chosen[owner] for owner in balance(numels, [loads[shard] for shard in chosen])]
    return largest_first(numels, [0] * len(loads), loads, WHOLE_ALIGNMENT)


def aligned(numel: int, alignment: int) -> int:
    """``numel``, rounded up to a multiple of ``alignment``."""
    return -(-numel // alignment) * alignment


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


def kind_of_group(
    optimizer_cls: type[Optimizer],
    kwargs: Mapping[str, Any],
    group: Mapping[str, Any],
    dtypes: Iterable[torch.dtype] = (),
) -> OptimizerKind:
    """As `classify`, of a param group whose weights have these ``dtypes``: a refused kind, if one of them is."""
    chosen = group["params"]
    device = chosen[0].device if chosen else torch.device("cpu")
    kinds = [classify(optimizer_cls, kwargs, group, device, dtype) for dtype in set(dtypes) or (torch.float32,)]
    return next((kind for kind in kinds if kind.reach.refused), kinds[0])


def needed_block(optimizer_cls: type[Optimizer], kind: OptimizerKind, *, has_all: bool) -> int:
    """Return the elements of a block of a parameter that may not be cut, counted from its first one; 1: any may be.

    `WHOLE`: the tensor must be whole, on the rank that owns it. ``has_all``: whether each rank updates all tensors, so
    that they may influence each other.

    Raises:
        ValueError: the class works in no layout.
    """
    if kind.reach.refused and not (has_all and kind.reach is Reach.CROSS_TENSOR):
        todo = "; take stage=0, where each rank updates all tensors" if kind.reach is Reach.CROSS_TENSOR else ""
        raise ValueError(f"optimizer_cls: {optimizer_cls.__name__} cannot be sharded: {kind.reason}{todo}")
    return kind.block if kind.reach in (Reach.ELEMENT_WISE, Reach.BLOCK_WISE) else WHOLE
