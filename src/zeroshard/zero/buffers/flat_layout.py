"""`FlatLayout`: ZeRO's layout of a flat buffer, with shards in parts, and with what views of gradients and plans ask.

With reproducible steps (`zeroshard.zero.transport.exact_sums`) a world of 2 with 4 parts is laid out, and cut into
pieces, as one of 8::

    part 0    part 1    part 2    part 3    part 4    part 5    part 6    part 7
    |---------|---------|---------|---------|---------|---------|---------|---------|
    |                rank 0                 |                rank 1                 |

If an optimizer needs whole tensors, no slot crosses the border of a shard: `zeroshard.zero.whole_tensors.layout`.

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

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroshard.settings import rules
from zeroshard.zero.core import layout
from zeroshard.zero.core.layout import LEAST_ALIGNED, Piece, Slot

WHOLE = sys.maxsize  # elements of a block of a parameter that may not be cut at all


@dataclass(frozen=True)
class FlatLayout(layout.FlatLayout):
    """Slots in a flat buffer that is divided into ``world_size`` shards of ``parts`` parts each.

    Attributes:
        slots, world_size, alignment: as of the core's, which raises ValueError for what they may not be.
        parts: number of equal parts of each shard, from 1 on; pieces end at their borders.
        block: pieces begin at multiples of it, counted from their parameter's first element: [Note: Blocks of a
            parameter]. A power of two, or 1.
    """

    parts: int = 1
    block: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        rules.check_count("parts", self.parts)
        rules.check_count("block", self.block)
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
        """Lay out parameters ``(name, shape)`` end to end, in the order given; other arguments: see the attributes."""
        slots = layout.FlatLayout.of(shapes, world_size, alignment).slots
        return cls(
            slots if block == 1 else tuple(_in_blocks(slots, alignment, block)), world_size, alignment, parts, block
        )

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included; if shards differ, of the longest."""
        part = layout.FlatLayout(self.slots, self.world_size * self.parts, self.alignment).shard_numel
        return self.parts * (part + -part % self.block)

    def keeps_blocks(self, block: int) -> bool:
        """Whether no shard cuts a block of so many elements of a parameter; `WHOLE`: whether none cuts a parameter."""
        return self.keeps_tensors_whole or self.block % block == 0

    @property
    def part_numel(self) -> int:
        """Elements of each part of a shard."""
        return self.shard_numel // self.parts

    def own_numel(self, rank: int) -> int:
        """Elements of ``rank``'s shard."""
        start, stop = self.interval(rank)
        return stop - start

    def owned(self, rank: int) -> tuple[Piece, ...]:
        """Return the pieces of parameters in ``rank``'s shard, in order; empty parameters belong to no rank."""
        return tuple(piece for part in self._parts_of(rank) for piece in self.pieces(*part))

    def tensors(self) -> tuple[Piece, ...]:
        """Return every parameter that is not empty as one piece, whichever ranks own it."""
        return tuple(self.pieces(0, self.padded_numel))

    def part(self, rank: int, slot: int) -> tuple[int, int]:
        """``[start, stop)`` of the flattened parameter in that slot that ``rank`` owns; (0, 0): nothing."""
        return self.slots[slot].within(*self.interval(rank))

    def cut(self, rank: int, slot: int) -> list[tuple[int, int]]:
        """As `part`, but one interval for each of the `parts` of ``rank``'s shard."""
        return [self.slots[slot].within(*part) for part in self._parts_of(rank)]

    def _parts_of(self, rank: int) -> list[tuple[int, int]]:
        """``[start, stop)`` of each part of ``rank``'s shard in the flat buffer."""
        own = self.interval(rank)
        if self.parts == 1:
            return [own]
        first, numel = rank * self.parts, self.part_numel
        return [(index * numel, (index + 1) * numel) for index in range(first, first + self.parts)]


def _in_blocks(slots: Iterable[Slot], alignment: int, block: int) -> Iterator[Slot]:
    """Yield the slots, moved back so far that no multiple of ``block`` lies inside a block of a parameter."""
    end = 0
    for slot in slots:
        start = end + (-end % alignment if slot.numel >= LEAST_ALIGNED else 0)
        if start % block + slot.numel > block:
            start += -start % block
        yield Slot(slot.name, slot.shape, start)
        end = start + slot.numel
