"""Hooks by which `Passes` hears of a unit's forward and backward, and by which gradients reach their flat buffers.

Hooks on the tensors that go into a module and come out tell when its backward ends and begins: a call's outputs
receive their gradients before anything inside runs backward, and its inputs receive theirs after everything inside has.
Recomputed modules, and outputs that are views or inside of objects, need `zeroshard.zero.runtime.module_hooks`.

[Note: Which call]
    A module may be called several times, and a graph run backward twice: a call's hooks fire once per backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import tree_leaves, tree_map
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.core.passes import Passes


class UnitHooks:
    """The hooks of one unit's module; ``cast``: the dtype that floating-point inputs are cast to, or None."""

    def __init__(self, unit: Any, passes: Passes[Any, Any], cast: torch.dtype | None = None) -> None:
        self.unit, self.passes, self.cast = unit, passes, cast

    def attach(self) -> list[Any]:
        """Hook the module; returns removable handles."""
        before, after, module = uncompiled(self.before), uncompiled(self.after), self.unit.module
        pre_hook = module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        return [pre_hook, module.register_forward_hook(after, with_kwargs=True)]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward: report it, and hook the inputs, whose gradients end the backward."""
        unit, passes = self.unit, self.passes
        passes.pre_forward(unit)
        if torch.is_grad_enabled():
            # Hook them now: the module may change its inputs in place, or put its outputs into the same container.
            inputs, forward = self.with_graph((*args, *kwargs.values())), passes.forward
            forward.hook(inputs, once_per_pass(passes, lambda: passes.post_backward(unit, forward)))
        return self.cast_inputs(args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After forward: report it, and hook the outputs, whose gradients begin the backward."""
        unit, passes, forward = self.unit, self.passes, self.passes.forward
        outputs = self.with_graph(output) if torch.is_grad_enabled() else []
        forward.hook(outputs, once_per_pass(passes, lambda: passes.pre_backward(unit, forward)))
        passes.post_forward(unit, grads_flow=bool(outputs))

    def with_graph(self, value: Any) -> list[Tensor]:
        """The tensors in nested containers through which gradients flow on."""
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments in the dtype ``cast``, as a pre-hook returns them; None: as they are."""
        if self.cast is None:
            return None
        cast = partial(Tensor.to, dtype=self.cast)
        return tree_map(lambda x: cast(x) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs))


def once_per_pass(passes: Passes[Any, Any], event: Callable[[], None]) -> Callable[[Tensor], None]:
    """A hook of tensors that calls ``event`` at the first gradient of each backward pass: [Note: Which call]."""
    last: object = None

    def hook(grad: Tensor) -> None:
        nonlocal last
        if last is None or last is not passes.backward:
            event()
            last = passes.backward

    return hook


def take_gradients(passes: Passes[Any, Any]) -> list[Any]:
    """Have each trained parameter's gradient moved to its flat buffer once autograd has it; returns handles."""
    # Weak references: the garbage collector cannot follow a parameter's hooks. The module's hooks keep us alive.
    slots = [(weakref.ref(group), *each) for group in passes.groups() for each in enumerate(group.params.params)]
    hooks = [(param, partial(uncompiled(_take), weakref.ref(passes), group, slot)) for group, slot, param in slots]
    return [param.register_post_accumulate_grad_hook(hook) for param, hook in hooks if param.requires_grad]


def _take(passes_ref: Callable[[], Any], group_ref: Callable[[], Any], slot: int, param: Tensor) -> None:
    group, grad, param.grad = group_ref(), param.grad, None
    passes_ref().expect_grad(group)
    group.grads.accumulate(slot, grad)
