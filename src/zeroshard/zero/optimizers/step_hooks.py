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
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.host.torch_internals import hooks_of
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.buffers.unit import FlatGroup
from zeroshard.zero.core.optimizer import pieces_in
from zeroshard.zero.optimizers.operands import LaterUpdates, Lists
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


class _Operands:
    """Brings the operands of one optimizer: `begin` before its class's own code, and `end` after it.

    A class of `torch.optim` steps unit by unit, so that only one unit's operands are brought at a time; so does one
    that declares that it may (`OptimizerKind.by_unit`). Another may count its steps, so it steps once, on all of them.
    """

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._of = piecewise
        self._may_repeat = piecewise.is_called_by_unit
        self._later: dict[FlatGroup, Lists] = {}

    def begin(self, *, by_unit: bool) -> None:
        """Bring the operands; the param groups must hold pieces.

        ``by_unit``: run the class's step here for all units but the last; the groups then hold only that one's pieces.
        """
        operands, here, self._later = self._of.operands, self._of.pieces, {}
        if operands.later is not None:
            here = self._set_aside(operands.later, by_unit=by_unit)
        if not operands.to_bring(chain.from_iterable(here)):
            return
        step = self._own_step() if by_unit else None
        if step is None:
            self._bring(here)
            return
        units = [lists for group, lists in self._by_unit().items() if group not in self._later]
        for number, unit in enumerate(units):
            if number:
                step(self._of.optimizer)
                self.end()
            operands.bring_unit(self._of.optimizer, step, unit)

    def end(self) -> None:
        """Take back what was brought, also after a step that has raised."""
        self._of.operands.take_back()

    def arm(self) -> None:
        """Have the pieces that were set aside updated, after the class's own code has run for the others."""
        units, self._later = self._later, {}
        step, later = self._own_step(), self._of.operands.later
        if step is not None and later is not None:  # also of no units, as it ends what a step has begun
            later.arm(self._of, step, units)

    def _set_aside(self, later: LaterUpdates, *, by_unit: bool) -> Lists:
        """Take the pieces out of the groups that are updated later; return those that stay."""
        if not by_unit or self._own_step() is None:
            later.complete_grads()
            return self._of.pieces
        self._later = {group: lists for group, lists in self._by_unit().items() if later.takes(group)}
        aside = {piece for lists in self._later.values() for piece in chain.from_iterable(lists)}
        here = [[piece for piece in pieces if piece not in aside] for pieces in self._of.pieces]
        for group, pieces in zip(self._of.optimizer.param_groups, here, strict=True):
            group["params"] = pieces
        return here

    def _bring(self, by_group: Lists) -> None:
        for group, pieces in zip(self._of.optimizer.param_groups, by_group, strict=True):
            group["params"] = pieces
            self._of.operands.bring(self._of.operands.to_bring(pieces))

    def _by_unit(self) -> dict[FlatGroup, Lists]:
        """The pieces that have gradients, flat group by flat group."""
        found: dict[FlatGroup, Lists] = {}
        for place, chosen in enumerate(self._of.by_group):
            for group, slot in (self._of.homes[param] for param in chosen):
                own = [piece for _, piece in pieces_in(group, slot) if piece.grad is not None]
                if own:
                    found.setdefault(group, [[] for _ in self._of.by_group])[place] += own
        return found

    def _own_step(self) -> Callable[[Any], Any] | None:
        """The class's ``step`` without hooks; None if it may not be called unit by unit, or if torch hides it."""
        step: Any = type(self._of.optimizer).step
        return step.__wrapped__ if self._may_repeat and getattr(step, "hooked", False) else None


class _Steps:
    """The engine's hooks around the steps of one optimizer, and how deeply the running step is nested."""

    def __init__(self, piecewise: PiecewiseOptimizer) -> None:
        self._piecewise = piecewise
        self._operands = _Operands(piecewise)
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
