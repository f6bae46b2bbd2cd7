"""Hooks on parameters: each takes a gradient as soon as autograd has it, and sets ``param.grad`` to a `ShardedGrad`.

[Note: What a parameter shows]
    From a parameter's first gradient until gradients are cleared, ``param.grad`` is a `ShardedGrad`. Until the
    reduction it raises when it is read; after it, it is the mean over ranks. It is None if no rank had a gradient.
    Autograd adds the next micro-batch's gradient to it; the `ShardedGrad` sets that one aside for the hook to take.
    `apply_assigned_grads` applies what the user has assigned to ``param.grad`` (None, or a tensor) before gradients are
    used or added to.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import as_plain, let_foreach_take
from zeroshard.zero.buffers.param_changes import resized
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.hooks import take_gradient
from zeroshard.zero.runtime.sharded_grad import GradHome, GradTaker, ShardedGrad, own_slice


class GradHooks:
    """The hooks of one engine, ``taker``: they take each gradient to its flat buffer, and set ``param.grad``."""

    def __init__(self, taker: GradTaker) -> None:
        self._taker = weakref.ref(taker)
        self._frozen: list[ParamGrad] = []
        self._hooked: list[ParamGrad] = []
        self._handles: list[Any] = []

    def attach(self, units: Iterable[FlatUnit]) -> None:
        """Hook these units' parameters after removing all earlier hooks; gradients that they show are cleared."""
        self.detach()
        let_foreach_take(ShardedGrad)
        for unit in units:
            for name, param, group, slot in unit.named_slots():
                param.grad = None
                if group.grads.reduced_dtype != param.dtype:
                    param.grad_dtype = None  # allows a gradient of another dtype, such as the reduced one
                self._frozen.append(ParamGrad(GradHome(self._taker, group, slot, name), group, param))
        self.attach_trained()

    def attach_trained(self) -> None:
        """Hook parameters that were frozen and are trained now: autograd accepts no hook on a frozen parameter."""
        frozen = []
        for param_grad in self._frozen:
            if param_grad.param.requires_grad:
                param_grad.group.unfreeze()
                each = param_grad
                self._handles.append(take_gradient(self._taker(), each.group, each.slot, each.param, each))
                self._hooked.append(param_grad)
            else:
                frozen.append(param_grad)
        self._frozen = frozen

    def begin_forward(self) -> None:
        """The model is called: apply what was assigned, and hook parameters that are trained now."""
        self.apply_assigned_grads()
        if self._frozen:
            self.attach_trained()

    def detach(self) -> None:
        """Remove all hooks and the gradients that parameters show."""
        for handle in self._handles:
            handle.remove()
        for param_grad in self._hooked:
            param_grad.hide()
        self._handles, self._hooked, self._frozen = [], [], []

    def show_grads(self) -> None:
        """After a backward: set ``param.grad`` of every parameter that had a gradient on any rank.

        Raises:
            RuntimeError: something was added to a gradient inside backward, before its reduction.
        """
        with as_plain():
            for param_grad in self._hooked:
                if param_grad.grad._arrived is not None:
                    param_grad.grad.take_arrived()
                    raise RuntimeError(
                        f"{param_grad.name}.grad: something was added to it inside backward, before it was reduced "
                        "over ranks; change gradients after backward"
                    )
                if param_grad.group.grads.used[param_grad.slot] and param_grad.param.grad is None:
                    param_grad.param.grad = param_grad.grad

    def apply_assigned_grads(self) -> None:
        """Apply what the user assigned to ``param.grad``: None clears the gradient, a tensor replaces it."""
        with nullcontext() if torch.compiler.is_compiling() else as_plain():
            # Three times in each step for each parameter, hence in one expression.
            found = [
                (each, grad)
                for each in self._hooked
                if (grad := each.param.grad) is not (each.grad if each.group.grads.used[each.slot] else None)
            ]
        taker = self._taker()
        given = [(each.name, grad) for each, grad in found if grad is not None and not isinstance(grad, ShardedGrad)]
        if given and taker is not None:
            taker.require_same_grads((name, _dense(grad)) for name, grad in given)
        for param_grad, grad in found:
            if grad is None:
                param_grad.clear()
            else:
                param_grad.replace(grad)

    def hide_grads(self, params: set[nn.Parameter] | None) -> None:
        """Set ``grad`` of ``params`` (None: of all) to None, after their gradients were cleared."""
        with as_plain():
            for param_grad in self._hooked:
                if params is None or param_grad.param in params:
                    param_grad.hide()


class ParamGrad:
    """One parameter and the `ShardedGrad` that it shows, another one in each step: [Note: What a parameter shows]."""

    def __init__(self, home: GradHome, group: FlatGroup, param: nn.Parameter) -> None:
        self.param, self.group = param, group
        self.taker, self.slot, self.name, self.shape = home.taker, home.slot, home.name, home.shape
        self._home, self._dtype = home, group.grads.reduced_dtype
        self._like = torch.empty(home.shape, device="meta")
        self.grad = ShardedGrad(home, self._like, self._dtype)

    def take(self, param: Tensor) -> Tensor:
        """Return the gradient that autograd has left in ``param.grad``, and take it off there."""
        grad = param.grad
        if isinstance(grad, ShardedGrad):
            grad = grad.take_arrived()
        else:
            param.grad = None
        assert grad is not None
        if param.grad_dtype is None:
            grad = grad.to(param.dtype)  # as autograd would have done
        if grad.shape != self.shape:
            raise RuntimeError(resized(self.name, grad.shape, self.shape))
        return grad

    def hide(self) -> None:
        """The gradient was cleared: make the `ShardedGrad` unreadable for code that kept a reference to it."""
        self.param.grad = None
        self._home.gone = True
        self._home = GradHome(self.taker, self.group, self.slot, self.name)
        self.grad = ShardedGrad(self._home, self._like, self._dtype)

    def clear(self) -> None:
        """Clear the gradient, as the user did by assigning None."""
        taker = self.taker()
        assert taker is not None
        taker.drop_grads({self.param})
        self.hide()

    def replace(self, grad: Tensor) -> None:
        """Replace the gradient by ``grad``: each rank copies the part that it owns."""
        if isinstance(grad, ShardedGrad) and grad.is_all_of(self._home):  # its own gradient, detached
            self.param.grad = self.grad
            return
        full = grad.full_tensor() if isinstance(grad, ShardedGrad) else _dense(grad)
        start, stop = own_slice(self._home)
        put(self.group.grads, self.slot, full.reshape(-1)[start:stop])
        self.group.expose_grads()
        self.param.grad = self.grad


def put(grads: Gradients, slot: int, part: Tensor) -> None:
    """Replace this rank's part of the reduced gradient of ``slot`` by ``part``."""
    grads.wait_for_reduce()
    grads.copy_in()
    if grads.reduced is None and grads.adds_in_place:
        grads.reduced = grads.complete()[grads.own_slice]
    elif grads.reduced is None:
        numel = grads.own_slice.stop - grads.own_slice.start
        grads.reduced = torch.zeros(numel, dtype=grads.reduced_dtype, device=grads.device)
    grads.of_slot(slot).copy_(part)
    grads.written[slot], grads.used[slot] = False, True
    grads.unusable.pop(slot, None)


def _dense(grad: Tensor) -> Tensor:
    return grad.detach().to_dense() if grad.is_sparse else grad.detach()
