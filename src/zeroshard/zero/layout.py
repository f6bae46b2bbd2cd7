"""Where each parameter lies in a flat buffer, and which part of it each rank owns: pure arithmetic.

    slot 0      slot 1         slot 2    padding
    |-----------|--------------|---------|--|          padded_numel = shard_numel * world_size
    |     rank 0     |     rank 1     |  rank 2  ...   each rank owns shard_numel elements

Slots lie end to end in order; shards ignore their borders, so every rank owns the same number of elements however
uneven the parameters are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Slot:
    """A parameter's place: ``flat[offset : offset + numel]``, seen as ``shape``."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of a slot that lies in one shard.

    Attributes:
        slot: index of the slot in the layout.
        interval: ``[start, stop)`` in the flattened parameter; never empty.
        offset: of the piece's first element in the flat buffer.
    """

    slot: int
    interval: tuple[int, int]
    offset: int

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return self.interval[1] - self.interval[0]


@dataclass(frozen=True)
class FlatLayout:
    """Slots end to end, padded so that ``world_size`` equal shards tile them.

    Raises:
        ValueError: ``world_size`` below 1.
    """

    slots: tuple[Slot, ...]
    world_size: int

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size: {self.world_size} ranks; give at least 1")

    @classmethod
    def of(cls, shapes: Iterable[tuple[str, Sequence[int]]], world_size: int) -> FlatLayout:
        """Lay out parameters ``(name, shape)`` in the order given."""
        slots: list[Slot] = []
        offset = 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), offset))
            offset += slots[-1].numel
        return cls(tuple(slots), world_size)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_numel(self) -> int:
        """Elements that each rank owns, padding included."""
        return -(-self.numel // self.world_size)

    @property
    def padded_numel(self) -> int:
        """Elements of the flat buffer."""
        return self.shard_numel * self.world_size

    def interval(self, rank: int) -> tuple[int, int]:
        """``[start, stop)`` of ``rank``'s shard in the flat buffer."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter as a view of ``flat [padded_numel]``, in its shape."""
        return [flat[slot.offset : slot.offset + slot.numel].view(slot.shape) for slot in self.slots]

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """The pieces of parameters in ``rank``'s shard, in order; empty parameters belong to no rank."""
        start, stop = self.interval(rank)
        pieces = []
        for index, slot in enumerate(self.slots):
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if first < last:
                pieces.append(Piece(index, (first - slot.offset, last - slot.offset), first))
        return tuple(pieces)
