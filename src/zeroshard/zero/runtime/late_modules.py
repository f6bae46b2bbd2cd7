"""Refuses changes of which parameters a model has, and where, that an engine built before them cannot follow.

The engine gathers a unit's weights while that unit runs, the root unit's while the model runs, and averages and steps
the gradients of the parameters that it was built with. So after `Zero()` a parameter stays in its unit:

| change                                                | what happens                                                |
|-------------------------------------------------------|-------------------------------------------------------------|
| a parameter of the root unit is tied to another's     | may be done                                                 |
| one of another unit is tied to a module outside of it | refused at once: at stage 3 that module would read NaN      |
| another parameter in its place, new ones, resized ones| refused at once: they would never be averaged nor stepped   |
| a module with new parameters to train                 | refused at once                                             |
| a module with new frozen parameters                   | may come; refused in the next forward if they are trained   |
| a module is moved, shared, wrapped, or deleted        | may be done; checkpoints have the names that it has then    |
| an entry of a module's ``_parameters`` is overwritten | refused in the next step                                    |

torch has one list of hooks for the whole process that are called when a module is registered in another; ours is added
to it once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

from zeroshard.zero.buffers.unit import Unit

MARK = "_zeroshard"  # on modules and parameters that have an engine: its `Known`, or the name of the unit
ROOT = ""  # the mark of parameters in the root unit
_LATE = "_zeroshard_late"  # on modules that were added to a marked module since

_lock = threading.Lock()
_watching = False


class Known:
    """The parameters of a model that has an engine, and the modules that own them.

    Args:
        model: the model, when its engine is built.
        root, units: the engine's units.
    """

    def __init__(self, model: nn.Module, root: Unit, units: Iterable[Unit]) -> None:
        self._model = model
        self._homes = {param: unit for unit in (root, *units) for _, param, _, _ in unit.named_slots()}
        self._places = [
            (module, key, param)
            for module in model.modules()
            for key, param in module._parameters.items()
            if param is not None
        ]
        self._late: list[tuple[nn.Module, str, nn.Module]] = []
        for module in model.modules():
            vars(module)[MARK] = self
        for param, unit in self._homes.items():
            vars(param)[MARK] = ROOT if unit is root else unit.name
        _watch()

    def forget(self) -> None:
        """Unmark the model's modules and parameters, because its engine is being removed."""
        for part in (*self._model.modules(), *self._model.parameters()):
            for mark in (MARK, _LATE):
                vars(part).pop(mark, None)

    def register_parameter(self, module: nn.Module) -> Callable[[str, nn.Parameter | None], None]:
        """Return a ``module.register_parameter`` that accepts only parameters that the module has had before."""

        def register(key: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self._require_own(module, key, param)
            type(module).register_parameter(module, key, param)

        return register

    def _require_own(self, module: nn.Module, key: str, param: nn.Parameter) -> None:
        if any(owner is module and each is param for owner, _, each in self._places):
            return
        unit = self._homes.get(param)
        if unit is None:
            raise RuntimeError(
                f"{key}: a parameter that comes after Zero() would never be trained; put it into the model before, "
                "or copy its values into the old one inside zero.full_params(write_back=True)"
            )
        if vars(param)[MARK] != ROOT and all(each is not module for each in unit.module.modules()):
            raise RuntimeError(_tied(self._name(module, key), unit.name))

    def came_late(self, module: nn.Module, key: str, child: nn.Module) -> None:
        """Note that ``child`` is about to become ``module.key``; RuntimeError if it brings what the engine lacks."""
        _require_frozen(f"{key}.", child)
        if MARK not in vars(child):
            still = [entry for entry in self._late if entry[0]._modules.get(entry[1]) is entry[2]]
            self._late = [*still, (module, key, child)]

    def require_frozen(self) -> None:
        """Raise RuntimeError if a module that came later has got parameters to train, or tied ones."""
        for module, key, child in self._late:
            if module._modules.get(key) is child:
                _require_frozen(f"{self._name(module, key)}.", child)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if a parameter is where no method of the module would have put it."""
        self.require_frozen()
        for module, key, param in self._places:
            now = module._parameters.get(key)
            if now is not param and isinstance(now, nn.Parameter):
                self._require_own(module, key, now)

    def _name(self, module: nn.Module, key: str) -> str:
        found = next((name for name, each in self._model.named_modules() if each is module), "")
        return f"{found}.{key}" if found else key


def _require_frozen(prefix: str, child: nn.Module) -> None:
    for name, param, part in _parameters_of(child):
        if MARK not in vars(param) and param.requires_grad:
            raise RuntimeError(
                f"{prefix}{name}: a parameter that comes after Zero() would never be trained, nor be the same on "
                "every rank; put the module into the model before Zero(), or freeze it"
            )
        if MARK in vars(param) and MARK not in vars(part) and not isinstance(part, ParametrizationList):
            raise RuntimeError(_tied(prefix + name, "another module's"))


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for prefix, part in module.named_modules():
        for key, param in part._parameters.items():
            if param is not None:
                yield f"{prefix}.{key}" if prefix else key, param, part


def _tied(name: str, unit: str) -> str:
    return (
        f"{name}: it was tied after Zero() to a parameter that is gathered for the unit {unit} alone; tie parameters "
        "before Zero(), or leave that unit out of Zero(units=...)"
    )


def _watch() -> None:
    """From now on call `Known.came_late` when a module is registered inside a model that has an engine."""
    global _watching
    with _lock:
        if not _watching:
            register_module_module_registration_hook(_before_registration)
            _watching = True


def _before_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None:
        return
    if MARK in vars(module):
        vars(module)[MARK].came_late(module, name, child)
    elif _LATE in vars(module):
        _require_frozen(f"{name}.", child)
    else:
        return
    for part in child.modules():
        vars(part)[_LATE] = True
