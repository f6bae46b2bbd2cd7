"""Modules that come into a model after its engine: refused where they bring parameters that it would never train.

A head that is exchanged, a block that is appended, adapters that are put around layers: no engine has their parameters,
so no rank would average their gradients, and each would train its own. torch tells one list of hooks of every module
that is registered in another; ours is put there once.
"""

from __future__ import annotations

import threading

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

MARK = "_zeroshard"  # on modules and parameters that have an engine
_LATE = "_zeroshard_late"  # on modules that have come into such a one since

_lock = threading.Lock()
_watching = False


def watch() -> None:
    """From now on no module of an engine's model takes one in that brings other parameters to train."""
    global _watching
    with _lock:
        if not _watching:
            register_module_module_registration_hook(_before_registration)
            _watching = True


def forget(module: nn.Module) -> None:
    """It may take in what it will again."""
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
