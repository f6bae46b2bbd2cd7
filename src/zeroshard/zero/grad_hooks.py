"""A hook on each parameter, which takes its gradient the moment autograd has it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from zeroshard.zero.unit import FlatGroup, Unit


class GradTaker(Protocol):
    """What becomes of a gradient."""

    def take_grad(self, group: FlatGroup, slot: int, grad: Tensor) -> None:
        """``grad``: of the group's parameter in that slot, in its shape; nobody else holds it."""
        ...


class GradHooks:
    """The hooks of one engine. ``param.grad`` stays None: each gradient goes to ``taker`` instead."""

    def __init__(self, taker: GradTaker) -> None:
        self._taker = weakref.ref(taker)
        self._frozen: list[tuple[FlatGroup, int, nn.Parameter]] = []
        self._handles: list[Any] = []

    def attach(self, units: Iterable[Unit]) -> None:
        """Hook these units' parameters, and no others any more; gradients that they have are forgotten."""
        self.detach()
        self._frozen = []
        for unit in units:
            for _, param, group, slot in unit.named_slots():
                param.grad = None
                self._frozen.append((group, slot, param))
        self.attach_trained()

    def attach_trained(self) -> None:
        """Hook what is trained now and was frozen before: autograd takes no hook on a frozen parameter."""
        frozen = []
        for group, slot, param in self._frozen:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(self._hook(group, slot)))
            else:
                frozen.append((group, slot, param))
        self._frozen = frozen

    def detach(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, group: FlatGroup, slot: int) -> Callable[[Tensor], None]:
        # Weakly: the garbage collector cannot see through a parameter's hook. The module's own hooks keep us alive.
        taker_ref, group_ref = self._taker, weakref.ref(group)

        def take(param: Tensor) -> None:
            taker, group = taker_ref(), group_ref()
            grad, param.grad = param.grad, None
            assert grad is not None
            assert taker is not None
            assert group is not None
            taker.take_grad(group, slot, grad)

        return take
