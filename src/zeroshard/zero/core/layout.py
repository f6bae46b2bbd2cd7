"""Where each parameter lies in a flat buffer, and which part of it each rank owns: pure arithmetic.

    slot 0      slot 1         slot 2    padding
    |-----------|--------------|---------|--|          padded_numel = shard_numel * world_size
    |     rank 0     |     rank 1     |  rank 2  ...   each rank owns shard_numel elements

Slots lie end to end in order. Shards have equal length, and may begin or end in the middle of a slot: every rank owns
the same number of elements, however uneven the parameters are. That suits optimizers that work element by element. In
an engine's layouts, slots and shards of at least `LEAST_ALIGNED` elements begin at multiples of `ALIGNMENT` elements,
so that a parameter of one element does not misalign those after it.

If an optimizer needs whole tensors, no slot crosses the border of a shard: `zeroshard.zero.whole_tensors.layout`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import ClassVar

import torch
from torch import Tensor

from zeroshard import rules
from zeroshard.comm import Communicator, Work, reduce_scatter_consuming

ALIGNMENT = 8
"""Elements to which an engine aligns slots and shards: 16 bytes of a 16-bit dtype, 32 of fp32. One load of a GPU thread
takes 16 bytes, matrix kernels and their descriptors require tensors to be aligned to 16 bytes, and NCCL copies in units
of 16 bytes; more would only pad. Most parameters have a multiple of `ALIGNMENT` elements and need no padding."""


LEAST_ALIGNED = 256
"""Elements of the smallest slot, and of the smallest shard, that is aligned: for less, padding would exceed 3 %."""


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


def view_of(flat: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """The elements of ``flat`` (1-D, contiguous) from ``offset`` on, in ``shape``.

    One operation, because a slice and its ``view`` take twice the time.
    """
    return flat.as_strided(shape, _strides(shape), flat.storage_offset() + offset)


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def check_counts(world_size: int, alignment: int, parts: int) -> None:
    """Raise ValueError for a number of a `FlatLayout` that is not a whole number from 1 on."""
    for name, value in (("world_size", world_size), ("alignment", alignment), ("parts", parts)):
        rules.check_count(name, value)


@dataclass(frozen=True)
class Piece:
    """The part of a slot that lies in one shard.

    Attributes:
        slot: index of the slot in the layout.
        interval: ``[start, stop)`` in the flattened parameter; never empty.
        offset: offset of the piece's first element in the flat buffer.
        shape: shape that the optimizer sees: the parameter's own if tensors are whole, else one dimension.
    """

    slot: int
    interval: tuple[int, int]
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.interval[1] - self.interval[0]


@dataclass(frozen=True)
class FlatLayout:
    """Slots in a flat buffer that is divided into ``world_size`` shards.

    Attributes:
        slots: places of the parameters, in their order, end to end.
        world_size: number of shards.
        alignment: offsets of slots and lengths of shards from `LEAST_ALIGNED` elements on are multiples of this.
        parts: number of equal parts of each shard; pieces end at their borders. A world of 2 with 4 parts is laid out,
            and cut into pieces, as one of 8: see `zeroshard.zero.transport.exact_sums`.

    Raises:
        ValueError: ``world_size``, ``alignment`` or ``parts`` that is no whole number from 1 on; a shape with a number
            that is no whole one from 0 on. Methods raise it for a rank outside the world.
    """

    slots: tuple[Slot, ...]
    world_size: int
    alignment: int = 1
    parts: int = 1
    keeps_tensors_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_counts(self.world_size, self.alignment, self.parts)

    @classmethod
    def of(
        cls, shapes: Iterable[tuple[str, Sequence[int]]], world_size: int, alignment: int = 1, parts: int = 1
    ) -> FlatLayout:
        """Lay out parameters ``(name, shape)`` end to end, in the order given; other arguments: see the attributes."""
        check_counts(world_size, alignment, parts)
        slots: list[Slot] = []
        offset = 0
        for name, shape in shapes:
            slot = Slot(name, tuple(shape), offset)
            if slot.numel >= LEAST_ALIGNED:
                slot = Slot(name, slot.shape, aligned(offset, alignment))
            slots.append(slot)
            offset = slot.offset + slot.numel
        return cls(tuple(slots), world_size, alignment=alignment, parts=parts)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included; if shards differ, of the longest."""
        end = max((slot.offset + slot.numel for slot in self.slots), default=0)
        least = -(-end // (self.world_size * self.parts))
        return self.parts * (aligned(least, self.alignment) if least >= LEAST_ALIGNED else least)

    @property
    def part_numel(self) -> int:
        """Elements of each part of a shard."""
        return self.shard_numel // self.parts

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.world_size

    def own_numel(self, rank: int) -> int:
        """Elements of ``rank``'s shard."""
        start, stop = self.interval(rank)
        return stop - start

    def interval(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of ``rank``'s shard in the flat buffer; (0, 0) if it owns nothing."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: {rank} is outside a world of {self.world_size}; ranks count from 0")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    @cached_property
    def padding(self) -> tuple[tuple[int, int], ...]:
        """``[start, stop)`` of each range that belongs to no parameter, in order."""
        gaps = []
        position = 0
        for slot in sorted(self.slots, key=lambda slot: slot.offset):
            if slot.offset > position:
                gaps.append((position, slot.offset))
            position = max(position, slot.offset + slot.numel)
        if position < self.padded_numel:
            gaps.append((position, self.padded_numel))
        return tuple(gaps)

    def zero_padding(self, flat: Tensor) -> None:
        """Fill the padding of ``flat [padded_numel]`` with zeros."""
        for start, stop in self.padding:
            flat[start:stop].zero_()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter as a view of ``flat [padded_numel]``, in its shape."""
        return [view_of(flat, slot.offset, slot.shape) for slot in self.slots]

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return each rank's shard of ``flat [padded_numel]``, in the order of ranks, as a view."""
        return list(flat.split(self.shard_numel))

    # Collectives over the ranks that hold the shards, ``comm``. Whoever waits for the handle has the result.

    def gather(self, comm: Communicator, full: Tensor, own: Tensor) -> Work:
        """Start to gather every rank's shard ``own`` into ``full [padded_numel]``, of which ``own`` may be a slice."""
        return comm.all_gather(full, own)

    def reduce(self, comm: Communicator, target: Tensor, local: Tensor) -> Work:
        """Start to sum all ranks' ``local [padded_numel]``, this rank's shard of the sum into ``target``.

        ``target`` may be that shard of ``local``. The values of ``local`` are undefined afterwards.
        """
        return reduce_scatter_consuming(comm, target, local)

    def all_reduce(self, comm: Communicator, local: Tensor) -> Work:
        """Start to sum all ranks' ``local [padded_numel]`` in place, with the bits that `reduce` gives each shard."""
        if comm.uniform_order:
            return comm.all_reduce(local)
        # This backend's all-reduce adds in another order than its reduce-scatter: issue the latter, and gather.
        start, stop = self.interval(comm.rank)
        comm.reduce_scatter(local[start:stop], local).wait()
        return comm.all_gather(local, local[start:stop])

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of parameters in ``rank``'s shard, in order; empty parameters belong to no rank."""
        pieces = []
        for start, stop in self._parts_of(rank):
            for index, slot in enumerate(self.slots):
                first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
                if first < last:
                    pieces.append(self._piece(index, first, last))
        return tuple(pieces)

    def _parts_of(self, rank: int) -> list[tuple[int, int]]:
        """``[start, stop)`` of each part of ``rank``'s shard in the flat buffer."""
        own = self.interval(rank)
        if self.parts == 1:
            return [own]
        first, numel = rank * self.parts, self.part_numel
        return [(index * numel, (index + 1) * numel) for index in range(first, first + self.parts)]

    def part(self, rank: int, slot: int) -> tuple[int, int]:
        """``[start, stop)`` of the flattened parameter in that slot that ``rank`` owns; (0, 0): nothing."""
        return self._within(slot, self.interval(rank))

    def cut(self, rank: int, slot: int) -> list[tuple[int, int]]:
        """As `part`, but one interval for each of the `parts` of ``rank``'s shard."""
        return [self._within(slot, interval) for interval in self._parts_of(rank)]

    def _within(self, slot: int, interval: tuple[int, int]) -> tuple[int, int]:
        (start, stop), offset = interval, self.slots[slot].offset
        first, last = max(start, offset), min(stop, offset + self.slots[slot].numel)
        return (first - offset, last - offset) if first < last else (0, 0)

    def tensors(self) -> tuple[Piece, ...]:
        """Return every parameter that is not empty as one piece, whichever ranks own it."""
        slots = enumerate(self.slots)
        return tuple(self._piece(i, slot.offset, slot.offset + slot.numel) for i, slot in slots if slot.numel)

    def updated_by_all(self, device: torch.device) -> tuple[Piece, ...]:
        """Return the pieces of a replicated optimizer: its updates must have the same bits as a sharded optimizer's."""
        # A CPU's kernels round an element differently in a vectorised body than in the scalar tail after it.
        if device.type == "cpu":
            return tuple(piece for rank in range(self.world_size) for piece in self.owned(rank))
        # A CUDA kernel computes each element alike, wherever it lies: pieces need not end at the borders of shards.
        return self.tensors()

    def _piece(self, index: int, first: int, last: int) -> Piece:
        slot = self.slots[index]
        return Piece(index, (first - slot.offset, last - slot.offset), first, (last - first,))


def aligned(numel: int, alignment: int) -> int:
    """``numel``, rounded up to a multiple of ``alignment``."""
    return -(-numel // alignment) * alignment
