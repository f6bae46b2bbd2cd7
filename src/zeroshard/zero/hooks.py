"""What the engine learns from the model while it runs, and how.

Module hooks tell when a unit's forward begins and ends. Hooks on the tensors that go in and come out tell when its
backward ends and begins: a call's outputs receive their gradients before anything inside runs backward, its inputs
receive theirs after everything inside has. A hook on each parameter takes its gradient the moment autograd has it.

[Note: Recomputation]
    Activation checkpointing runs a unit's forward again inside backward, and may leave it by an exception when it
    has seen enough. Such a forward must gather the weights but never free them: the backward that asked for it comes
    next. `in_backward` tells the two apart. The reentrant kind then runs a backward of its own, nested in the
    first, through what it recomputed; its inputs are leaves, which do not wait for what is inside, so a call ends
    when the nested backward does.

[Note: Which call]
    A module may be called several times before one backward, and the same graph may be run backward twice. Each
    call's hooks therefore fire once per backward pass, not once in their life.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.zero.unit import Unit


class Listener(Protocol):
    """What the engine does about each event."""

    def forward_begins(self, unit: Unit) -> None:
        """A unit's module is called."""
        ...

    def forward_ends(self, unit: Unit, *, grads_flow: bool, keep: bool) -> None:
        """It returns; ``keep``: nobody will tell when its weights are needed again."""
        ...

    def backward_begins(self, unit: Unit) -> None:
        """Gradients have reached the outputs of a call."""
        ...

    def backward_ends(self, unit: Unit) -> None:
        """Gradients have reached the inputs of a call."""
        ...

    @property
    def backward_pass(self) -> object:
        """The backward pass that is running; another object for each."""
        ...


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward."""
    return torch._C._current_graph_task_id() != -1


def attach(unit: Unit, listener: Listener, cast: torch.dtype | None) -> list[Any]:
    """Hook ``unit.module``; ``cast``: the dtype that floating-point inputs are cast to. Returns removable handles."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        listener.forward_begins(unit)
        if torch.is_grad_enabled() and not in_backward():
            # now: the module may change its inputs in place, or put its outputs into the container they came in
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.grad_fn is not None]
            _hook(inputs, _once_per_pass(listener, unit, listener.backward_ends))
        if cast is None:
            return None
        return tuple(_cast(value, cast) for value in args), {name: _cast(value, cast) for name, value in kwargs.items()}

    def begins_nested(unit: Unit) -> None:
        listener.backward_begins(unit)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: listener.backward_ends(unit))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if in_backward():
            outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
            _hook(outputs, _once_per_pass(listener, unit, begins_nested))
            return
        if not torch.is_grad_enabled():
            listener.forward_ends(unit, grads_flow=False, keep=False)
            return
        inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
        outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
        _hook(outputs, _once_per_pass(listener, unit, listener.backward_begins))
        # Gradients will flow, but no tensor of the output was found to tell us when: the weights must stay.
        keep = not outputs and bool(inputs or unit.trained_groups())
        listener.forward_ends(unit, grads_flow=bool(outputs), keep=keep)

    return [
        unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        unit.module.register_forward_hook(after, with_kwargs=True),
    ]


def _hook(tensors: Iterable[Tensor], hook: Callable[[Tensor], None]) -> None:
    for tensor in tensors:
        tensor.register_hook(hook)


def _once_per_pass(listener: Listener, unit: Unit, event: Callable[[Unit], None]) -> Callable[[Tensor], None]:
    last: list[object] = [None]

    def hook(grad: Tensor) -> None:
        if last[0] is None or last[0] is not listener.backward_pass:
            event(unit)
            last[0] = listener.backward_pass

    return hook


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its floating-point tensors in ``dtype``; itself, which may be written into, where they are."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not any(map(is_other, tree_leaves(value))):
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, value)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a structure of containers, dataclasses and plain objects; each once."""
    seen: set[int] = set()

    def walk(node: Any, depth: int) -> Iterator[Tensor]:
        for leaf in tree_leaves(node):
            if id(leaf) in seen or leaf is None or isinstance(leaf, str | bytes | int | float | nn.Module | type):
                continue
            seen.add(id(leaf))
            if isinstance(leaf, Tensor):
                yield leaf
            elif depth and dataclasses.is_dataclass(leaf):
                yield from walk([getattr(leaf, f.name) for f in dataclasses.fields(leaf)], depth - 1)
            elif depth and hasattr(leaf, "__dict__"):
                yield from walk(list(vars(leaf).values()), depth - 1)

    return walk(value, 4)
