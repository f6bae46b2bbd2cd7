"""Where each parameter lies in a flat buffer, which part of it each rank owns, and how ranks exchange their parts.

    slot 0      slot 1         slot 2    padding
    |-----------|--------------|---------|--|          padded_numel = shard_numel * world_size
    |     rank 0     |     rank 1     |  rank 2  ...   each rank owns shard_numel elements

Slots lie end to end in order. Shards have equal length, and may begin or end in the middle of a slot: every rank owns
the same number of elements. That suits optimizers that work element by element. For one that looks at whole tensors no
slot crosses the border of a shard: `zeroshard.zero.whole_tensors.layout`.

With reproducible steps (`zeroshard.zero.transport.exact_sums`) a world of 2 with 4 parts is laid out, and cut into
pieces, as one of 8::

    part 0    part 1    part 2    part 3    part 4    part 5    part 6    part 7
    |---------|---------|---------|---------|---------|---------|---------|---------|
    |                rank 0                 |                rank 1                 |

[Note: Blocks of a parameter]
    An optimizer with 8-bit states has one scale for each block of 256 elements. Its results do not depend on the number
    of ranks if blocks are counted from each parameter's first element, and no piece ends inside one. So with
    ``block=256`` parts are multiples of 256 long, a parameter of 256 elements or more begins at a multiple of 256, and
    a smaller one crosses none::

        slot 0 (600 elements)              slot 1   slot 2   slot 3 (100 each)
        |-----------|-----------|----|.....|----|----|......|----|......|......    . padding
        0          256         512        768               1024               border of a part: a multiple of 256

    At most 255 elements of padding precede a parameter, and up to 255 end each part: RaggedShard (veScale-FSDP 2026,
    arXiv:2602.22437) has the borders of shards at rows or blocks instead, and shards of different lengths.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, reduce_scatter_consuming
from zeroshard.settings import rules

# Elements to which an engine aligns slots and shards: 16 bytes of a 16-bit dtype, the unit of loads, kernels and NCCL.
ALIGNMENT = 8
LEAST_ALIGNED = 256  # elements of the smallest slot or shard that is aligned: for less, padding would exceed 3 %
WHOLE = sys.maxsize  # elements of a block of a parameter that may not be cut at all


@dataclass(frozen=True)
class Slot:
    """A parameter's place: ``flat[offset : offset + numel]``, seen as ``shape``."""

    name: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        if any(not isinstance(size, int) or size < 0 for size in self.shape):
            raise ValueError(f"shapes: each size of {self.name} must be an integer of at least 0, got {self.shape}")

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """``[start, stop)`` of the flattened parameter that lies in ``flat[start:stop]``; (0, 0): nothing does."""
        first, last = max(start - self.offset, 0), min(stop - self.offset, self.numel)
        return (first, last) if first < last else (0, 0)


@dataclass(frozen=True)
class Piece:
    """The part of a slot that lies in one shard, and that this shard's rank updates."""

    slot: int  # index of the slot in the layout
    interval: tuple[int, int]  # ``[start, stop)`` in the flattened parameter; never empty
    offset: int  # offset of the piece's first element in the flat buffer
    shape: tuple[int, ...]  # shape that the optimizer sees: one dimension, or the parameter's own if it is not cut

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.interval[1] - self.interval[0]


class UnevenShards(Protocol):
    """How ranks share a flat buffer of which each has a shard of another length, or none."""

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        ...

    def interval(self, rank: int) -> tuple[int, int]:
        """As of a `FlatLayout`."""
        ...

    def gather(self, comm: Communicator, full: Tensor, own: Tensor) -> Work:
        """As of a `FlatLayout`."""
        ...

    def reduce(self, comm: Communicator, target: Tensor, local: Tensor) -> Work:
        """As of a `FlatLayout`."""
        ...


@dataclass(frozen=True)
class FlatLayout:
    """Slots in a flat buffer that is divided into ``world_size`` shards of ``parts`` parts each.

    Raises ValueError for a ``world_size``, an ``alignment`` or ``parts`` below 1, a ``block`` that is no power of two,
    and for a rank outside the world.
    """

    slots: tuple[Slot, ...]  # places of the parameters, in their order
    world_size: int  # number of shards
    alignment: int = 1  # what offsets of slots and lengths of shards are multiples of, from `LEAST_ALIGNED` elements on
    parts: int = 1  # number of equal parts of each shard; pieces end at their borders
    block: int = 1  # pieces begin at multiples of it, counted from their parameter's first element
    longest: int | None = None  # elements of the longest shard, if none cuts a slot; None: shards may cut slots
    uneven: UnevenShards | None = None  # if such shards differ in length; None: all have one

    def __post_init__(self) -> None:
        for field in ("world_size", "alignment", "parts", "block"):
            rules.check_count(field, getattr(self, field))
        if self.block & (self.block - 1):
            raise ValueError(f"block: {self.block} is no power of two")

    @classmethod
    def of(
        cls,
        shapes: Iterable[tuple[str, Sequence[int]]],
        world_size: int,
        alignment: int = 1,
        parts: int = 1,
        block: int = 1,
    ) -> FlatLayout:
        """Lay out parameters ``(name, shape)`` end to end, in the order given, so that no shard cuts a ``block``."""
        rules.check_count("alignment", alignment)
        slots: list[Slot] = []
        end = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), end)
            start = end + (-end % alignment if slot.numel >= LEAST_ALIGNED else 0)
            if start % block + slot.numel > block > 1:  # [Note: Blocks of a parameter]
                start += -start % block
            slots.append(Slot(name, slot.shape, start))
            end = start + slot.numel
        return cls(tuple(slots), world_size, alignment, parts, block)

    @property
    def keeps_tensors_whole(self) -> bool:
        """Whether no shard cuts a slot."""
        return self.longest is not None

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def part_numel(self) -> int:
        """Elements of each part of a shard, padding included; if shards differ, of the longest."""
        if self.longest is not None:
            return self.longest // self.parts
        end = max((slot.offset + slot.numel for slot in self.slots), default=0)
        part = -(-end // (self.world_size * self.parts))
        part += -part % self.alignment if part >= LEAST_ALIGNED else 0
        return part + -part % self.block

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included; if shards differ, of the longest."""
        return self.parts * self.part_numel if self.longest is None else self.longest

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.world_size if self.uneven is None else self.uneven.padded_numel

    def interval(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of ``rank``'s shard in the flat buffer; (0, 0) if it owns nothing."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: {rank} is outside a world of {self.world_size}; ranks count from 0")
        if self.uneven is not None:
            return self.uneven.interval(rank)
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def parts_of(self, rank: int) -> list[tuple[int, int]]:
        """``[start, stop)`` of each part of ``rank``'s shard in the flat buffer."""
        if self.parts == 1:
            return [self.interval(rank)]
        first, numel = rank * self.parts, self.part_numel
        return [(index * numel, (index + 1) * numel) for index in range(first, first + self.parts)]

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """``[start, stop)`` of each range that belongs to no parameter, in order."""
        spans = sorted((slot.offset, slot.offset + slot.numel) for slot in self.slots)
        starts, ends = [*(start for start, _ in spans), self.padded_numel], [0, *(end for _, end in spans)]
        return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def zero_padding(self, flat: Tensor) -> None:
        """Fill the padding of ``flat [padded_numel]`` with zeros."""
        for start, stop in self.padding:
            flat[start:stop].zero_()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter as a view of ``flat [padded_numel]``, in its shape."""
        return [view_of(flat, slot.offset, slot.shape) for slot in self.slots]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each rank's shard of ``flat [padded_numel]``, in the order of ranks, as a view."""
        if self.uneven is None:
            return list(flat.tensor_split(self.world_size))
        return [flat[slice(*self.interval(rank))] for rank in range(self.world_size)]

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of parameters in ``rank``'s shard, in order; empty parameters belong to no rank."""
        return tuple(piece for part in self.parts_of(rank) for piece in self.pieces(*part))

    def updated_by_all(self, device: torch.device) -> tuple[Piece, ...]:
        """Return the pieces of a replicated optimizer, whose updates round as those of a sharded one."""
        if device.type == "cpu":  # where a vectorised body and the tail after it round an element differently
            return tuple(piece for rank in range(self.world_size) for piece in self.owned(rank))
        return tuple(self.pieces(0, self.padded_numel))  # a CUDA kernel computes each element alike, wherever it lies

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Yield the piece of each parameter that lies in ``flat[start:stop]``, in order; none of an empty parameter."""
        for index, slot in enumerate(self.slots):
            first, last = slot.within(start, stop)
            if first < last:
                shape = slot.shape if self.keeps_tensors_whole else (last - first,)
                yield Piece(index, (first, last), slot.offset + first, shape)

    # Collectives over the ranks that hold the shards. `own` and `target` may be this rank's slice of the flat buffer.

    def gather(self, comm: Communicator, full: Tensor, own: Tensor) -> Work:
        """Start to gather every rank's shard, ``own``, into ``full [padded_numel]``."""
        return comm.all_gather(full, own) if self.uneven is None else self.uneven.gather(comm, full, own)

    def reduce(self, comm: Communicator, target: Tensor, local: Tensor) -> Work:
        """Start to sum all ranks' ``local [padded_numel]``, overwriting it; this rank's shard goes to ``target``."""
        if self.uneven is not None:
            return self.uneven.reduce(comm, target, local)
        return reduce_scatter_consuming(comm, target, local)

    def all_reduce(self, comm: Communicator, local: Tensor) -> Work:
        """Start to sum all ranks' ``local [padded_numel]`` in place, with the bits that `reduce` gives each shard."""
        if comm.uniform_order or self.uneven is not None:
            return comm.all_reduce(local)
        # This backend's all-reduce adds in another order than its reduce-scatter: issue the latter, and gather.
        own = local[slice(*self.interval(comm.rank))]
        comm.reduce_scatter(own, local).wait()
        return comm.all_gather(local, own)


def view_of(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """The elements of ``flat`` (1-D, contiguous) from ``offset`` on, in ``shape``: faster than a slice and its view."""
    return flat.as_strided(shape, _strides(shape), flat.storage_offset() + offset)


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
