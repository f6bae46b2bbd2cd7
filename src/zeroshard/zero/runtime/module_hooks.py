"""Hooks of modules inside of units, whose units are not called, and the modules that have methods of the engine's.

[Note: Parts]
    A model may call submodules of a unit without calling the unit. So every module that owns parameters has a hook. It
    does nothing while the unit itself runs; else it gathers the unit's weights and waits for them. No hook tells when
    backward has used such weights for the last time: they stay unsharded until the whole backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from zeroshard.host.torch_internals import in_transform
from zeroshard.zero.buffers.unit import FlatUnit
from zeroshard.zero.core.hooks import NOT_IN_TRANSFORM, EngineHook
from zeroshard.zero.core.weights import UNSHARDED


def attach_parts(
    units: Iterable[FlatUnit],
    hooked: Sequence[FlatUnit],
    model: nn.Module,
    pre_forward_of_part: Callable[[FlatUnit], None],
) -> list[Any]:
    """Hook modules that own parameters of a unit to call ``pre_forward_of_part`` first; not those of ``hooked`` units.

    So a model may call a unit's submodules instead of the unit. In compiled code the hook is traced: inside of the unit
    it adds nothing to the graph, and outside of it the graph ends before ``pre_forward_of_part``, which is uncompiled:
    [Note: Hooks inside of a unit] in `uncompiled`. Returns removable handles.
    """
    homes = {param: unit for unit in units for group in unit.groups for param in group.params.params}
    handles = []
    for module in model.modules():
        owners = dict.fromkeys(homes[param] for param in module.parameters(recurse=False) if param in homes)
        others = [unit for unit in owners if unit.module is not module or unit not in hooked]
        handles += [module.register_forward_pre_hook(_PartHook(pre_forward_of_part, unit)) for unit in others]
    return handles


def modules_with_methods(model: nn.Module, root: FlatUnit, units: Sequence[FlatUnit]) -> list[nn.Module]:
    """The modules of the units, and those outside of ``units`` that own parameters.

    They are the model's modules of [Note: Modules with methods of ours] in `module_methods`.
    """
    inside = {part for unit in units for part in unit.module.modules()}
    others = (part for part in model.modules() if part not in inside and [*part.parameters(recurse=False)])
    return list(dict.fromkeys([*(unit.module for unit in (root, *units)), *others]))


def is_current(unit: FlatUnit) -> bool:
    """Whether the unit's weights are unsharded and current now, and nothing is to be waited for."""
    return all(group.params.state is UNSHARDED for group in unit.groups)


class _PartHook(EngineHook):
    def __init__(self, pre_forward_of_part: Callable[[FlatUnit], None], unit: FlatUnit) -> None:
        self._pre_forward, self._unit = pre_forward_of_part, unit

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward of a part: report it, unless the unit's own forward is running."""
        if self._unit.entered:  # nearly always, and then its weights are unsharded
            return
        if not in_transform():
            self._pre_forward(self._unit)
        elif not is_current(self._unit):
            raise RuntimeError(NOT_IN_TRANSFORM.format(self._unit.name))
