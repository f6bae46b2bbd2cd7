"""Refuses modules that are added to a model after `Zero()` and bring parameters to train, which the engine lacks.

A head that is exchanged, a block that is appended, adapters around layers: the engine does not know their parameters,
so their gradients would not be averaged, and each rank would train its own values. torch has one list of hooks for the
whole process that are called when a module is registered in another; ours is added to it once.
"""

from __future__ import annotations

import threading

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

MARK = "_zeroshard"  # on modules and parameters that have an engine
_LATE = "_zeroshard_late"  # on modules that were added to a marked module since

_lock = threading.Lock()
_watching = False


def watch() -> None:
    """From now on refuse to register a module with new parameters to train inside a model that has an engine."""
    global _watching
    with _lock:
        if not _watching:
            register_module_module_registration_hook(_before_registration)
            _watching = True


def forget(module: nn.Module) -> None:
    """Unmark a module that was added late: it may register any module again."""
    vars(module).pop(_LATE, None)


def _before_registration(module: nn.Module, name: str, child: nn.Module | None) -> None:
    if child is None or not (MARK in vars(module) or _LATE in vars(module)):
        return
    for part, param in child.named_parameters(prefix=name):
        if param.requires_grad and MARK not in vars(param):
            raise RuntimeError(
                f"{part}: a parameter that comes after Zero() would never be trained, nor be the same on every rank; "
                "put the module into the model before Zero(), or freeze it"
            )
    for part in child.modules():
        vars(part)[_LATE] = True
