"""Places for gradients: an engine offers one for a parameter, and an operation computes the gradient right there.

Autograd lets each operation allocate the gradient that it returns; an engine then copies it into a flat buffer, scaled.
An operation that writes the scaled gradient into that buffer itself, as `zeroshard.kernels.linear` does, saves the copy
and its memory. To autograd it returns a `PlacedGrad`, which stands for the gradient without a scale. The engine that
gets one has nothing left to do; for any other code, such as a sum of two gradients, it is an ordinary tensor.

Megatron-LM fuses weight gradients and their buffer too (``gradient_accumulation_fusion``); its operations return no
gradient at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class GradPlace:
    """Where a gradient is to be written.

    Args:
        out: of the parameter's shape, contiguous.
        scale: a power of two, by which the gradient is multiplied.
    """

    def __init__(self, out: Tensor, scale: float) -> None:
        self.out, self.scale = out, scale
        self._grads: list[weakref.ref[PlacedGrad]] = []

    def stands_for(self, grad: PlacedGrad) -> None:
        """Record a tensor that stands for the gradient in this place."""
        self._grads.append(weakref.ref(grad))

    def leave(self) -> None:
        """Before ``out`` is overwritten: gradients that somebody has kept become tensors of their own."""
        for each in self._grads:
            grad: Any = each()
            if grad is not None:
                grad._fix_weakref()  # as torch's own weak references do: autograd may have kept it meanwhile
                grad.value()
        self._grads = []


class PlacedGrad(Tensor):
    """A gradient that lies in ``place``, multiplied by its scale. An operation on it gets the gradient itself, a copy.

    Attributes:
        place: where it lies; None once an operation has made the copy.
    """

    place: GradPlace | None
    _copy: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # ty: ignore[incompatible-method-override]

    @staticmethod
    def __new__(cls: type[PlacedGrad], place: GradPlace) -> PlacedGrad:
        """Stand for the gradient that was written to ``place``."""
        out = place.out
        made = Tensor._make_wrapper_subclass(cls, out.shape, storage_size=0, dtype=out.dtype, device=out.device)
        made.place = place
        place.stands_for(made)
        return made

    @classmethod
    def __torch_dispatch__(  # ty: ignore[incompatible-method-override] -- torch's own has other names
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run ``func`` on copies of the gradients; only a detached one stays in its place."""
        if func is torch.ops.aten.detach.default and args[0].place is not None:
            return PlacedGrad(args[0].place)
        args, kwargs = tree_map_only(PlacedGrad, PlacedGrad.value, (args, kwargs or {}))
        return func(*args, **kwargs)

    def value(self) -> Tensor:
        """The gradient, as an ordinary tensor that nobody else has; always the same one."""
        if self.place is not None:
            self._copy = self.place.out * (1.0 / self.place.scale)
            self.place = None
        return self._copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PlacedGrad(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


Offer = Callable[[torch.dtype], GradPlace | None]
"""Returns a place for a gradient of this dtype, or None. What it returns is taken; nobody else may be given it."""

_offers: dict[int, tuple[weakref.ref[Tensor], Offer]] = {}  # by the parameter's id


def offer(param: Tensor, place: Offer) -> None:
    """From now on let operations ask ``place`` where to write the gradient of ``param``, a leaf of autograd's graph.

    ``place`` must not refer to ``param``, which would then never be freed.
    """
    forget = partial(_offers.pop, id(param), None)
    _offers[id(param)] = (weakref.ref(param, lambda _: forget()), place)


def withdraw(param: Tensor) -> None:
    """Offer no place for the gradient of ``param`` any more."""
    _offers.pop(id(param), None)


def is_offered(param: Tensor) -> bool:
    """Whether an engine offers places for the gradient of ``param``."""
    return id(param) in _offers


def take(node: Any, dtype: torch.dtype) -> GradPlace | None:
    """Take the place for the gradient that a backward is about to return to ``node``, if there is one.

    None if others get the gradient: it is differentiated again (``create_graph``), hooks of the user on the parameter
    see it, or the caller of `torch.autograd.grad`.

    Args:
        node: the ``AccumulateGrad`` node of the parameter, from the ``next_functions`` of the node that runs.
        dtype: the gradient's dtype.
    """
    param = node.variable
    _, place = _offers.get(id(param), (None, None))
    if place is None or torch.is_grad_enabled() or param._backward_hooks:
        return None
    if len(param._post_accumulate_grad_hooks or ()) > 1 or not _is_executed(node):  # one hook is the engine's
        return None
    return place(dtype)


def is_wanted(node: Any) -> bool:
    """Whether the backward that runs needs the gradient that goes to ``node``."""
    return _is_executed(node) is not False


def _is_executed(node: Any) -> bool | None:
    """Whether the backward that runs will execute ``node``; None if `torch.autograd.grad` returns what goes there."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how torch says that
        return None
