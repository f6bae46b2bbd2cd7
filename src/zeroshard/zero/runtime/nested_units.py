"""Units inside of other units: the experts of a block that is a unit too, or the layers of one.

[Note: Units inside of units]
    A unit inside of another one is called after it, so it comes later in the order, and backward has both collectives
    of it behind it when it reaches the outer unit. But the inner unit's backward comes only then, and if the outer one
    is recomputed, so does another forward of it, on those ranks whose tokens go to this expert. So what backward does
    after the inner unit (it frees the weights, reduces the gradients) waits until the outer unit's own turn: up to it
    the inner weights are unsharded on every rank, and no rank gathers them alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.zero.buffers.unit import FlatUnit
from zeroshard.zero.core.schedule import Op


class InnerUnits:
    """Which units are inside of others, and what of the running backward waits for those.

    Attributes:
        waiting: the inner units whose turn has come, each with the operation that waits for the outer unit.
    """

    @classmethod
    def of(cls, units: Sequence[FlatUnit]) -> InnerUnits | None:
        """Return those of these units; None: no unit is inside of another."""
        found = cls(units)
        return found if found._outer else None

    def __init__(self, units: Sequence[FlatUnit]) -> None:
        by_module = {unit.module: unit for unit in units}
        inside = {unit: [by_module[part] for part in unit.module.modules() if part in by_module] for unit in units}
        inner = {each for unit in units for each in inside[unit] if each is not unit}
        self._outer = {each: unit for unit in units if unit not in inner for each in inside[unit] if each is not unit}
        self.waiting: dict[FlatUnit, Op] = {}

    def postpones(self, op: Op, order: Sequence[FlatUnit]) -> bool:
        """Whether the operation waits for the turn of a unit around its own, which is still to come."""
        unit = order[op.place]
        outer = self._outer.get(unit)
        if outer is None or order.index(outer) > op.place:
            return False
        self.waiting[unit] = op
        return True

    def due(self, outer: FlatUnit) -> list[Op]:
        """What has waited for the turn of this unit, which is now."""
        found = [unit for unit in self.waiting if self._outer[unit] is outer]
        return [self.waiting.pop(unit) for unit in found]
