"""Units of a model, from what a user gives as ``units``.

Which parameter belongs to which unit: `zeroshard.zero.core.units`.
"""

from __future__ import annotations

from torch import nn

from zeroshard.host.torch_internals import has_forward_hooks, own_parameters
from zeroshard.zero.core import units as by_module
from zeroshard.zero.unit_choice import UnitChoice, choose_units, is_container


class UnitSpec(by_module.UnitSpec):
    """A unit before its buffers exist."""

    @property
    def read_in_backward(self) -> bool:
        """Whether the module's backward reads its weights; the backward of a plain embedding lookup does not."""
        module = self.module
        plain = type(module) is nn.Embedding and list(own_parameters(module)) == ["weight"] and len(self.params) == 1
        return not plain or has_forward_hooks(module)


def partition(model: nn.Module, units: UnitChoice | None) -> tuple[UnitSpec, list[UnitSpec]]:
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
    root, *others = (UnitSpec(*spec) for spec in by_module.partition(model, chosen))
    return root, others
