"""Optimizers that the user made without the engine: ``torch.optim.AdamW(model.parameters())``.

Every script has this line, before `Zero` or after it. Left alone, such an optimizer would update weights that are
stale or freed, and the master weights would never change. So before its first step the engine takes it over: it
becomes what `Zero.optimizer` would have made. An optimizer that cannot be taken over is refused by name.

torch has one list of hooks for the steps of all optimizers in the process. Ours is in it while there is an engine; if
no engine knows the optimizer that steps, the hook looks up which engine its parameters belong to.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from zeroshard.host.uncompiled import uncompiled


class Adopter(Protocol):
    """The optimizers of an engine."""

    def adopt(self, optimizer: Optimizer, *, may_move: bool = False) -> None:
        """Take over an optimizer that the user has made."""


KNOWN = "_zeroshard"  # an attribute of an optimizer whose methods an engine has replaced
_owners: Any = WeakTensorKeyDictionary()  # parameter -> weak reference to its engine's `EngineOptimizers.adopt`
_replaced: Any = WeakTensorKeyDictionary()  # parameters on the meta device that `Zero` has replaced by others
_engines: weakref.WeakSet[Any] = weakref.WeakSet()  # the objects whose method `adopt` is
_lock = threading.Lock()
_hook: RemovableHandle | None = None


def register_params(params: Iterable[Tensor], engine: Adopter) -> None:
    """From now on ``engine`` takes over optimizers of these parameters."""
    global _hook
    reference = weakref.WeakMethod(engine.adopt)
    with _lock:
        for param in params:
            _owners[param] = reference
        _engines.add(engine)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(uncompiled(lambda optimizer, *_: take_over(optimizer)))


def unregister_params(params: Iterable[Tensor], engine: Adopter) -> None:
    """Make these parameters ordinary ones again; with the last engine goes torch's hook, unless it must refuse others.

    An engine that is only dropped leaves the hook: the collector may free it in the midst of a step, which goes through
    the hooks. It then does nothing.
    """
    global _hook
    with _lock:
        for param in params:
            _owners.pop(param, None)
        _engines.discard(engine)
        if _hook is not None and not any(True for _ in _engines) and not len(_replaced):
            _hook.remove()
            _hook = None


def replaced(params: Iterable[Tensor]) -> None:
    """Record that `Zero` has replaced these parameters by others."""
    with _lock:
        for param in params:
            _replaced[param] = True


def has_owner(param: Tensor) -> bool:
    """Whether a parameter belongs to a model that has an engine."""
    reference = _owners.get(param)
    return reference is not None and reference() is not None


def take_over(optimizer: Optimizer, *, may_move: bool = False) -> None:
    """Do now what the first step would do: if the optimizer's parameters are an engine's, that engine adopts it.

    Args:
        optimizer: the optimizer.
        may_move: whether parameters may move to the layout that the optimizer needs. That is collective, and must come
            before the first backward; a step comes after it.

    Raises:
        ValueError: it holds parameters of an engine's model beside others, or parameters that `Zero` has replaced.
    """
    if KNOWN in vars(optimizer) or not (len(_owners) or len(_replaced)):
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    name = type(optimizer).__name__
    if any(param in _replaced for param in params):
        raise ValueError(
            f"step: {name} holds parameters on the meta device, in whose place Zero() has put others; "
            "make it after Zero(), or by zero.optimizer()"
        )
    owners = [reference() for param in params if (reference := _owners.get(param)) is not None]
    if not owners:
        return
    if len(owners) < len(params) or any(owner != owners[0] for owner in owners):
        raise ValueError(
            f"step: {name} holds parameters of an engine's model beside others; give each an optimizer of its own"
        )
    if owners[0] is not None:
        owners[0](optimizer, may_move=may_move)
