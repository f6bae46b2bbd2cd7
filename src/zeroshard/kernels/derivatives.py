"""What our own backward passes can differentiate: `is_transformed`, and `once_differentiable` for Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import _functions
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_MESSAGE = b"the gradient of a Triton kernel cannot be differentiated again; use kernels='reference' for that"


def is_transformed(*tensors: Tensor) -> bool:
    """Whether an operation must be PyTorch's own: in transforms of `torch.func`, in forward-mode automatic
    differentiation, and for tensors that wrap others, such as `DTensor`.
    """
    if torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0:
        return True
    return any(is_traceable_wrapper_subclass(tensor) for tensor in tensors)


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make gradients that ``backward`` returns raise a RuntimeError if they are differentiated (``create_graph``).

    `torch.autograd.function.once_differentiable` does so only if the upstream gradient has a graph. That of a loss has
    none, so the gradients would count as constants, although they depend on the tensors that forward saved: a gradient
    penalty or a Hessian would be wrong, without an error.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *upstream: Tensor | None) -> Any:
        """Call ``backward``; under ``create_graph`` give its results a graph whose backward raises."""
        if not torch.is_grad_enabled():
            return backward(ctx, *upstream)
        with torch.no_grad():
            found = backward(ctx, *upstream)
        if torch.compiler.is_compiling():
            return found
        gradients = found if isinstance(found, tuple) else (found,)
        refuse: Any = _functions.DelayedError(_MESSAGE, len(gradients))
        return refuse(*(None if grad is None else grad.detach().requires_grad_() for grad in gradients))

    return wrapper
