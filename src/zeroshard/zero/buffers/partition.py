"""Units of a model, from what a user gives as ``units``.

Which parameter belongs to which unit: `zeroshard.zero.core.units`.
"""

from __future__ import annotations

from torch import nn

from zeroshard.zero.core.units import UnitSpec, partition
from zeroshard.zero.unit_choice import UnitChoice, choose_units, is_container


def partition_of(model: nn.Module, units: UnitChoice | None) -> tuple[UnitSpec, list[UnitSpec]]:
    """Return the root unit and the others, in the order given; a module that is given twice is one unit.

    Raises:
        TypeError: ``units`` holds something that is neither a module nor names one.
        ValueError: a name that is no class and no path of the model; a unit that is no submodule of the model, or
            that is never called (`nn.ModuleList`).
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    chosen = choose_units(model, units)
    for module in chosen:
        if module not in names:
            raise ValueError(f"units: a {type(module).__name__} is no submodule of the model; give its own submodules")
        if module is not model and is_container(module):
            raise ValueError(f"units: {names[module]!r} is a container that is never called; give its elements")
    root, *others = partition(model, chosen)
    return root, others
