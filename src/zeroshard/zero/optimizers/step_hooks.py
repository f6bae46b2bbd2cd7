"""Hooks around an optimizer's ``step``: the class's own code works on pieces, all other code sees parameters.

[Note: A step inside a step]
    torch runs an optimizer's hooks around every ``step`` that it has wrapped, and it wraps a class's ``step`` when the
    first optimizer of that class is built in the process. So if a subclass calls ``super().step()``, hooks may run
    around the inner step too. The subclass's own code continues after it, on pieces: to the engine only the outermost
    call is a step. The user's hooks around an inner step see parameters as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.host.torch_internals import hooks_of
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.optimizers.operands import OperandsOfSteps
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer


def surrounding_ids(piecewise: PiecewiseOptimizer) -> None:
    """Install the engine's hooks around the optimizer's steps, between the user's hooks and the class's own code."""
    optimizer, own = piecewise.optimizer, vars(piecewise.optimizer)
    steps = _Steps(piecewise)
    own["register_step_pre_hook"] = _between(
        optimizer.register_step_pre_hook,
        hooks_of(optimizer, "step_pre"),
        uncompiled(steps.enters),
        uncompiled(steps.begins),
    )
    _first(hooks_of(optimizer, "step_post"), optimizer.register_step_post_hook(uncompiled(steps.ends)))
    own["step"] = MethodType(steps.guarded(optimizer.step), optimizer)


def _between(
    register: Callable[..., Any], hooks: Any, first: Callable[..., Any], last: Callable[..., Any]
) -> Callable[..., Any]:
    """Run ``first`` before and ``last`` after all other hooks; returns a function that registers later ones between."""
    _first(hooks, register(first))
    ours = register(last)

    def register_between(hook: Callable[..., Any]) -> Any:
        handle = register(hook)
        hooks.move_to_end(ours.id)
        return handle

    return register_between


def _first(hooks: Any, handle: Any) -> None:
    hooks.move_to_end(handle.id, last=False)


class _Steps:
    """The engine's hooks around the steps of one optimizer, and how deeply the running step is nested."""

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._piecewise = piecewise
        self._operands = OperandsOfSteps(piecewise)
        self._brings = False  # whether the running step has operands that are elsewhere between steps
        self._depth = 0
        self._leaving: Any = None  # the handle of `leaves`

    def guarded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``step``, so that afterwards the groups hold parameters even if it raises."""

        @wraps(step)
        def run(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._depth = 0  # an exception may have ended the previous step
            try:
                return step(*args, **kwargs)
            finally:
                self._depth = 0
                self._leave()
                if self._brings:
                    self._operands.end()
                self._piecewise.show_params()

        return run

    # -- hooks, in the order in which torch runs them; the user's come after `enters` and after `ends` --------------

    def enters(self, *_: Any) -> None:
        """Before the user's hooks of an inner step: show parameters."""
        if self._depth:
            self._piecewise.show_params()

    def begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Before the class's own code: show pieces; a closure does so after backward."""
        self._depth += 1
        if self._depth > 1:
            self._piecewise.show_pieces()
            self._leave()
            self._leaving = optimizer.register_step_post_hook(uncompiled(self.leaves))
            return None
        operands = self._piecewise.operands
        self._brings = bool(operands.members) or operands.later is not None
        itself, *given = args  # torch passes the optimizer first
        closure = given[0] if given else kwargs.get("closure")
        if closure is None:
            self._piecewise.before_step()
            self._piecewise.show_pieces()
            if self._brings:
                self._operands.begin(by_unit=True)
            return None
        self._require_closure()
        wrapped = self._once(closure)
        self._piecewise.show_pieces()
        return ((itself, wrapped, *given[1:]), kwargs) if given else (args, {**kwargs, "closure": wrapped})

    def ends(self, *_: Any) -> None:
        """After the class's own code: show parameters again, and notify the engine."""
        self._depth -= 1
        if not self._depth and self._brings:
            self._operands.end()
        self._piecewise.show_params()
        if self._depth:
            self._piecewise.weights_changed()
        else:
            self._piecewise.after_step()
            if self._brings:  # after weights are marked stale: what an update leaves for the next gather is current
                self._operands.arm()

    def leaves(self, *_: Any) -> None:
        """After an inner step: show pieces to the rest of the class's own code; [Note: A step inside a step].

        It is registered for inner steps only and removes itself, which torch allows for the last hook alone.
        """
        if self._depth:
            self._piecewise.show_pieces()
        if self._depth == 1:
            self._leave()

    def _leave(self) -> None:
        if self._leaving is not None:
            self._leaving.remove()
            self._leaving = None

    def _require_closure(self) -> None:
        """Raise ValueError if a step with a closure would follow what differs between ranks."""
        for kind in self._piecewise.kinds:
            if kind.no_closure:
                name = type(self._piecewise.optimizer).__name__
                raise ValueError(f"step: {name} may not have a closure: {kind.no_closure}; call step() without one")

    def _once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure, which runs backward inside ``step``: gradients can be prepared only after it."""
        called = False

        def run() -> Any:
            """Call the user's closure; a second call raises RuntimeError."""
            nonlocal called
            if called:
                raise RuntimeError(
                    "step: the optimizer calls its closure a second time, and ranks would compute with weights from "
                    "before the step; use an optimizer that calls it once"
                )
            called = True
            self._piecewise.show_params()
            result = closure()
            self._piecewise.listener.before_update(set())
            self._piecewise.show_pieces()
            if self._brings:
                self._operands.begin(by_unit=False)
            return result

        return torch.enable_grad()(run)
