"""`FlatLayout`: ZeRO's layout of a flat buffer, with shards in parts, and with what views of gradients and plans ask.

With reproducible steps (`zeroshard.zero.transport.exact_sums`) a world of 2 with 4 parts is laid out, and cut into
pieces, as one of 8::

    part 0    part 1    part 2    part 3    part 4    part 5    part 6    part 7
    |---------|---------|---------|---------|---------|---------|---------|---------|
    |                rank 0                 |                rank 1                 |

If an optimizer needs whole tensors, no slot crosses the border of a shard: `zeroshard.zero.whole_tensors.layout`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from zeroshard import rules
from zeroshard.zero.core import layout
from zeroshard.zero.core.layout import Piece


@dataclass(frozen=True)
class FlatLayout(layout.FlatLayout):
    """Slots in a flat buffer that is divided into ``world_size`` shards of ``parts`` parts each.

    Attributes:
        slots, world_size, alignment: as of the core's, which raises ValueError for what they may not be.
        parts: number of equal parts of each shard, from 1 on; pieces end at their borders.
    """

    parts: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        rules.check_count("parts", self.parts)

    @classmethod
    def of(
        cls, shapes: Iterable[tuple[str, Sequence[int]]], world_size: int, alignment: int = 1, parts: int = 1
    ) -> FlatLayout:
        """Lay out parameters ``(name, shape)`` end to end, in the order given; other arguments: see the attributes."""
        return cls(layout.FlatLayout.of(shapes, world_size, alignment).slots, world_size, alignment, parts)

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(slot.numel for slot in self.slots)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each rank's shard, padding included; if shards differ, of the longest."""
        return self.parts * layout.FlatLayout(self.slots, self.world_size * self.parts, self.alignment).shard_numel

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
