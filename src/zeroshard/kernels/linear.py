"""y = x W^T + b, whose backward computes W's gradient where an engine wants it: `zeroshard.grad_places`.

    dx = g W        dW = g^T x        db = sum of g over rows

The products are those of `torch.nn.functional.linear`, and so are the bits, because a scale is a power of two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from zeroshard import grad_places
from zeroshard.kernels.derivatives import is_transformed

PASSES_LINEAR = "passes_linear"  # attribute of a `TorchFunctionMode` that leaves linear layers alone


class _PlacedLinear(torch.autograd.Function):
    """`torch.nn.functional.linear` of x [..., in], weight [out, in] and bias [out] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """-> [..., out]."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        y = F.linear(x, weight, bias)
        return y.detach() if y._is_view() else y  # a view that is made here could not be changed in place

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """g [..., out] -> the gradients of x, weight and bias, in their shapes and dtype."""
        (g,) = upstream
        if g is None:  # an operation after this one has no gradient
            return None, None, None
        x, weight = ctx.saved_tensors
        (x_node, _), (weight_node, _), *others = ctx.next_functions
        rows = g.reshape(-1, g.shape[-1])
        d_x = d_weight = d_bias = None
        # What asks the engine comes before the products: after them, the caches hold nothing of the interpreter's.
        if others and grad_places.is_wanted(others[0][0]):
            d_bias = rows.sum(0)
        wanted = ctx.needs_input_grad[0] and grad_places.is_wanted(x_node)
        if grad_places.is_wanted(weight_node):
            factors = (rows.t(), x.reshape(-1, x.shape[-1]))
            is_seen, ctx.is_seen = getattr(ctx, "is_seen", False), True  # the user may hook a graph that was retained
            to = None if is_seen or _autocasts(g) else grad_places.receiver(weight_node)
            place = None if to is None else to.place(g.dtype)
            if to is not None and place is not None:
                to.arrives()
                torch.addmm(place, *factors, beta=0, alpha=to.scale, out=place)
            else:
                d_weight = torch.mm(*factors)
                if to is not None and to.takes(d_weight):
                    d_weight = None
        if wanted:
            d_x = rows.mm(weight).view(x.shape)
        return d_x, d_weight, d_bias


def _told(register: str) -> Callable[..., Any]:
    def method(node: Any, hook: Callable[..., Any]) -> Any:
        """Register ``hook``, and note that the gradients which the node returns are seen by others."""
        node.is_seen = True
        return getattr(super(_PlacedLinear._backward_cls, node), register)(hook)

    return method


for _register in ("register_hook", "register_prehook"):  # what the users of ``y.grad_fn`` call
    setattr(_PlacedLinear._backward_cls, _register, _told(_register))


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`; if an engine offers a place for the weight's gradient, it is computed there.

    Results are the same. It is torch's own operation under `torch.compile`, `torch.jit.trace` and autocast, inside a
    `TorchFunctionMode`, for complex and sparse tensors, and where `is_transformed` says so.

    Args:
        input: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``, or None.
    """
    return (_PlacedLinear.apply if _computes_here(input, weight) else F.linear)(input, weight, bias)


def _computes_here(input: Tensor, weight: Tensor) -> bool:
    """Whether to compute with `_PlacedLinear`."""
    if torch.compiler.is_compiling() or not grad_places.is_offered(weight) or not torch.is_grad_enabled():
        return False
    if not weight.requires_grad or weight.is_complex() or input.layout is not torch.strided or input.is_nested:
        return False
    return not (_autocasts(input) or _is_intercepted() or torch.jit.is_tracing() or is_transformed(input, weight))


def _is_intercepted() -> bool:
    """Whether a user's mode is given torch's functions, and so could change what the operation returns."""
    if not torch._C._len_torch_function_stack():
        return False
    modes = _get_current_function_mode_stack()
    return any(type(mode) is not DeviceContext and not getattr(mode, PASSES_LINEAR, False) for mode in modes)


def _autocasts(tensor: Tensor) -> bool:
    """Whether autocast is enabled now for operations on the tensor's device."""
    if not torch._C._is_any_autocast_enabled():
        return False
    on = tensor.device.type
    return on != "meta" and torch.is_autocast_enabled(on)
