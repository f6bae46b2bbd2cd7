"""Places for gradients: an engine offers one for a parameter, and an operation computes the gradient right there.

Autograd lets each operation allocate the gradient that it returns; an engine then copies it into a flat buffer, scaled.
An operation that writes the scaled gradient into that buffer itself, as `zeroshard.kernels.linear` does, saves the copy
and its memory. It tells the engine, and returns no gradient to autograd; so does Megatron-LM
(``gradient_accumulation_fusion``).

[Note: Who else sees a gradient]
    Autograd carries the gradient as ever if other code would miss it: a caller of `torch.autograd.grad`, a second
    differentiation (``create_graph``), hooks of the user on the parameter, hooks on its ``AccumulateGrad`` node. Those
    of a node cannot be listed, so they are expected wherever Python code holds the node, as code that hooks nodes does:
    a node lives no longer than the graphs that lead to it otherwise. Hooks on a node that only graphs keep alive get
    None.
"""

from __future__ import annotations

import sys
import weakref
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor


class Receiver(Protocol):
    """Receives the gradients of one parameter past autograd.

    Attributes:
        scale: a power of two, by which a gradient that is computed in a place must be multiplied.
    """

    scale: float

    def place(self, dtype: torch.dtype) -> Tensor | None:
        """Where to write the gradient of this dtype, scaled: contiguous, of the parameter's shape. None: nowhere.

        Who gets a place calls `arrives`, and writes there at once.
        """
        ...

    def arrives(self) -> None:
        """The gradient is about to be written to the place that was given last."""
        ...

    def takes(self, grad: Tensor) -> bool:
        """Add ``grad``, unscaled, if an earlier gradient of this backward was placed; return whether it was added.

        So a weight that is used several times gets its gradients one by one, in the order in which autograd adds them.
        """
        ...


_receivers: dict[int, tuple[weakref.ref[Tensor], Receiver]] = {}  # by the parameter's id


def offer(param: Tensor, receiver: Receiver) -> None:
    """From now on give operations ``receiver`` for gradients of ``param``, a leaf of autograd's graph.

    ``receiver`` must not refer to ``param``, which would then never be freed.
    """
    forget = partial(_receivers.pop, id(param), None)
    _receivers[id(param)] = (weakref.ref(param, lambda _: forget()), receiver)
    _Probe.unheld()  # counted now rather than inside a backward


def withdraw(param: Tensor) -> None:
    """Offer nothing for gradients of ``param`` any more."""
    _receivers.pop(id(param), None)


def is_offered(param: Tensor) -> bool:
    """Whether an engine offers to receive gradients of ``param``."""
    return id(param) in _receivers


def receiver(node: Any) -> Receiver | None:
    """Return who receives the gradient that a backward is about to return to ``node``.

    None: autograd does, because there is no offer, or because of [Note: Who else sees a gradient].

    Args:
        node: the ``AccumulateGrad`` node of the parameter, from the ``next_functions`` of the node that runs. Its
            backward refers to it by one name.
    """
    references = sys.getrefcount(node)
    param = node.variable
    _, found = _receivers.get(id(param), (None, None))
    if found is None or torch.is_grad_enabled() or param._backward_hooks or references > _Probe.unheld():
        return None
    if not param.requires_grad or torch.is_anomaly_enabled():  # it was frozen since; torch looks for NaN
        return None
    if len(param._post_accumulate_grad_hooks or ()) > 1 or not _is_executed(node):  # one hook is the engine's
        return None
    return found


class _Probe(torch.autograd.Function):
    """Counts the references to a node that nobody holds, as `receiver` sees them; torch and Python hold some."""

    count = 0

    @classmethod
    def unheld(cls) -> int:
        """The count, which is the same for every node."""
        if not cls.count:
            with torch.inference_mode(False), torch.enable_grad():
                cls.apply(torch.zeros((), device="cpu", requires_grad=True)).backward()
        return cls.count

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        ((node, _),) = ctx.next_functions
        _Probe.count = _references(node)


def _references(node: Any) -> int:
    return sys.getrefcount(node)


def is_wanted(node: Any) -> bool:
    """Whether the backward that runs needs the gradient that goes to ``node``."""
    return _is_executed(node) is not False


def _is_executed(node: Any) -> bool | None:
    """Whether the backward that runs will execute ``node``; None if `torch.autograd.grad` returns what goes there."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how torch says that
        return None
