"""Refuses changes of which parameters a model has, and where, that an engine built before them cannot follow.

The engine gathers weights for the modules that owned them when it was built, and averages and steps the gradients of
these parameters alone. So after `Zero()` a parameter stays with its modules:

| change                                                | what happens                                                |
|-------------------------------------------------------|-------------------------------------------------------------|
| a parameter is tied to another module's               | refused at once: at stage 3 that module would read NaN      |
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
from collections.abc import Callable, Iterator

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.utils.parametrize import ParametrizationList

MARK = "_zeroshard"  # on modules and parameters that have an engine; on modules it is the engine's `Known`
_LATE = "_zeroshard_late"  # on modules that were added to a marked module since

_lock = threading.Lock()
_watching = False


class Known:
    """The parameters of a model that has an engine, and the modules that own them.

    Args:
        model: the model, when its engine is built.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = [
            (module, key, param)
            for module in model.modules()
            for key, param in module._parameters.items()
            if param is not None
        ]
        self._late: list[tuple[nn.Module, str, nn.Module]] = []
        for module in model.modules():
            vars(module)[MARK] = self
        for param in model.parameters():
            vars(param)[MARK] = True
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
        owners = [(owner, name) for owner, name, each in self._places if each is param]
        name = self._name(module, key)
        if not owners:
            raise RuntimeError(
                f"{name}: a parameter that comes after Zero() would never be trained; put it into the model before, "
                "or copy its values into the old one inside zero.full_params(write_back=True)"
            )
        if all(owner is not module for owner, _ in owners):
            raise RuntimeError(_tied(name, self._name(*owners[0])))

    def came_late(self, module: nn.Module, key: str, child: nn.Module) -> None:
        """Note that ``child`` is about to become ``module.key``; RuntimeError if it brings what the engine lacks."""
        _require_frozen(f"{key}.", child)
        if MARK not in vars(child):
            self._late.append((module, key, child))

    def require_frozen(self) -> None:
        """Raise RuntimeError if a module that came later has got parameters to train, or tied ones."""
        for module, key, child in self._late:
            if module._modules.get(key) is child:
                _require_frozen(f"{self._name(module, key)}.", child)

    def require_unchanged(self) -> None:
        """Raise RuntimeError if another parameter is in the place of one, or as `require_frozen` does."""
        self.require_frozen()
        for module, key, param in self._places:
            now = module._parameters.get(key)
            if now is not param and now is not None:
                name = self._name(module, key)
                raise RuntimeError(
                    f"{name}: another parameter was put into its place after Zero(), and would never be averaged nor "
                    "stepped; put it there before, or copy its values inside zero.full_params(write_back=True)"
                )

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


def _tied(name: str, other: str) -> str:
    return (
        f"{name}: it was tied to {other} after Zero(), which gathers weights for the modules that had them before; "
        "tie parameters before Zero()"
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
