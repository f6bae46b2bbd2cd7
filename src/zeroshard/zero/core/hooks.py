"""Hooks by which `Passes` hears of a unit's forward and backward, and by which gradients reach their flat buffers.

Hooks on the tensors that go into a module and come out tell when its backward ends and begins: a call's outputs
receive their gradients before anything inside runs backward, and its inputs receive theirs after everything inside has.

[Note: Which call]
    A module may be called several times, and a graph run backward twice: a call's hooks fire once per backward pass.

[Note: Recomputation]
    Activation checkpointing runs a unit's forward again inside backward, and may leave it by an exception once it
    has recomputed enough. Such a forward must gather the weights but never free them: the backward that asked for it
    comes next. `in_backward` tells it from an ordinary forward. Reentrant checkpointing then runs a backward of its
    own, nested in the first, through what it recomputed. Its inputs are leaves, whose gradients may arrive before
    everything inside is done, so such a call ends when the nested backward ends.

[Note: Transforms]
    Inside `torch.func.grad`, `vmap` and the like a tensor stands for several, and torch refuses writes into buffers. So
    the engine ignores a unit's call there: the unit's weights must be readable already, and the transform keeps the
    gradients.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import (
    at_end_of_backward,
    base_of,
    in_backward,
    in_transform,
    tree_leaves,
    tree_map,
)
from zeroshard.host.uncompiled import made_once, uncompiled
from zeroshard.zero.core.forward import Event, Forward
from zeroshard.zero.core.units import Unit
from zeroshard.zero.core.weights import UNSHARDED

NO_COPY = (
    "copy.deepcopy(model): the copy would drive this model's engine; copy it before Zero(), "
    "use zero.ema() for an average of its weights, or load zero.state_dict() into a new one"
)
NOT_IN_TRANSFORM = (
    "{}: weights cannot be gathered inside a transform of torch.func (grad, vmap, jvp); "
    "call the transform inside zero.full_params()"
)


class Listener(Protocol):
    """What hears of units: `Passes`, or another one in its place.

    Attributes:
        forward, backward: as of `Passes`.
    """

    forward: Forward

    @property
    def backward(self) -> object:
        """The backward pass that is running."""
        ...

    def pre_forward(self, unit: Any) -> None:
        """A unit is called."""

    def post_forward(self, unit: Any, *, grads_flow: bool, keep_unsharded: bool = False) -> None:
        """A unit returns. ``keep_unsharded``: no hook will tell when backward needs its weights."""

    def pre_backward(self, unit: Any, forward: Forward | None) -> None:
        """A call's outputs have their gradients; ``forward``: None for a call that was recomputed in backward."""

    def post_backward(self, unit: Any, forward: Forward | None) -> None:
        """A call's inputs have their gradients; ``forward``: None for a call that was recomputed in backward."""

    def views(self, unit: Any, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of the tensors that share storage with weights of the unit that are freed after forward."""
        ...


class UnitHooks:
    """The hooks of one unit's module; ``cast``: the dtype that floating-point inputs are cast to, or None."""

    def __init__(self, unit: Unit[Any], passes: Listener, cast: torch.dtype | None = None) -> None:
        self.unit, self.passes, self.cast = unit, passes, cast

    def attach(self) -> list[Any]:
        """Hook the module; returns removable handles."""
        hook, module = _hook_of_unit(), self.unit.module
        return [
            module.register_forward_pre_hook(hook(self.before), with_kwargs=True, prepend=True),
            module.register_forward_hook(hook(self.after), with_kwargs=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward: report it, and hook the inputs, whose gradients end the backward."""
        unit, passes = self.unit, self.passes
        if in_transform():  # [Note: Transforms]
            if not all(group.params.state is UNSHARDED for group in unit.groups):
                raise RuntimeError(NOT_IN_TRANSFORM.format(unit.name))
        else:
            passes.pre_forward(unit)
            if torch.is_grad_enabled() and not in_backward():
                # Hook them now: the module may change its inputs in place, or put its outputs into the same container.
                forward = passes.forward
                inputs = [t for t in tensors_in((*args, *kwargs.values())) if t.grad_fn is not None]
                if inputs:
                    end = Event(passes, lambda: passes.post_backward(unit, forward))
                    forward.hook_inputs(inputs, end, unit)
        if self.cast is None:
            return None
        return tuple(cast(arg, self.cast) for arg in args), {k: cast(arg, self.cast) for k, arg in kwargs.items()}

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After forward: report that the unit is done, and hook the outputs, whose gradients begin the backward."""
        if in_transform():
            return None
        unit, passes, forward = self.unit, self.passes, self.passes.forward
        returned, output = output, _outliving(passes, unit, output)
        inputs = tensors_in((*args, *kwargs.values()))
        if in_backward():  # [Note: Recomputation]
            event = uncompiled(Event(passes, self._begins_nested))
            for tensor in _with_bases(tensors_in(output), inputs):
                tensor.register_hook(event)
        elif not torch.is_grad_enabled():
            passes.post_forward(unit, grads_flow=False)
        else:
            inputs = [t for t in inputs if t.requires_grad]
            outputs = _with_bases(tensors_in(output), inputs)
            # The hooks refer to ``forward``, so it lives as long as a graph of this forward does.
            begin = Event(passes, lambda: passes.pre_backward(unit, forward))
            grads_flow = forward.hook_outputs(outputs, begin, unit)
            # Gradients will flow, but no tensor of the output was found to tell us when: the weights must stay.
            keep_unsharded = not outputs and bool(inputs or unit.trained_groups())
            passes.post_forward(unit, grads_flow=grads_flow, keep_unsharded=keep_unsharded)
        return None if output is returned else output

    def _begins_nested(self) -> None:
        self.passes.pre_backward(self.unit, None)
        at_end_of_backward(uncompiled(lambda: self.passes.post_backward(self.unit, None)))


class EngineHook:
    """A module's hook that belongs to one engine: it, and so the module, can be neither copied nor pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "torch.save(model), pickle: the model holds this rank's engine; save zero.state_dict(), or everything by "
            "zeroshard.save()"
        )


@made_once
def _hook_of_unit() -> Any:  # a class; made late, because `uncompiled` imports the compiler
    class UnitHook(EngineHook):
        """Runs a function before or after the forward of a unit."""

        def __init__(self, run: Callable[..., Any]) -> None:
            self._run = run

        @uncompiled
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run the function."""
            return self._run(*args, **kwargs)

    return UnitHook


def _with_bases(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the outputs that have a graph, and the tensors made in forward of which they are views.

    If a view is changed in place, backward goes past the view's own node, and so past a hook on it, to its base.
    """
    found = [tensor for tensor in outputs if tensor.grad_fn is not None]
    bases = [base for tensor in found if (base := base_of(tensor)) is not None]
    if not bases:
        return found
    given = {id(tensor if (base := base_of(tensor)) is None else base) for tensor in inputs}
    return found + [base for base in bases if base.grad_fn is not None and id(base) not in given]


def _outliving(passes: Listener, unit: Unit[Any], output: Any) -> Any:
    """Return ``output`` with clones of tensors that share storage with the unit's weights, which will be freed.

    Raises:
        RuntimeError: such a tensor is inside an object, where it cannot be replaced.
    """
    found = passes.views(unit, tensors_in(output))
    if not found:
        return output
    views = {id(tensor) for tensor in found}
    output = tree_map(lambda leaf: leaf.clone() if id(leaf) in views else leaf, output)
    if passes.views(unit, tensors_in(output)):
        raise RuntimeError(
            f"{unit.name}: it returns a view of its own weights inside an object, and they are freed after forward; "
            "return a clone"
        )
    return output


# -- tensors in arguments and outputs ----------------------------------------------------------------------------------


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``: ``value`` itself, not a copy, if they all are."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not any(map(is_other, tree_leaves(value))):
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, value)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in a structure of containers, dataclasses and plain objects; each once."""
    if isinstance(value, Tensor):
        return [value]
    if type(value) is tuple:  # of tensors, as most arguments
        found: dict[int, Tensor] = {}
        for leaf in value:
            if isinstance(leaf, Tensor):
                found[id(leaf)] = leaf
            elif leaf is not None:
                return list(_anywhere_in(value))
        return list(found.values())
    return list(_anywhere_in(value))


def _anywhere_in(value: Any) -> Iterator[Tensor]:
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

    yield from walk(value, 4)


# -- gradients ------------------------------------------------------------------------------------------------------


class ShownGrad(Protocol):
    """What a parameter shows as its ``grad`` while it has one: `zeroshard.zero.runtime.grad_hooks`.

    Attributes:
        grad: it.
    """

    grad: Any

    def take(self, param: Tensor) -> Tensor:
        """Return the gradient that autograd has left in, or added to, ``param.grad``; neither is left there."""
        ...


def take_gradient(passes: Any, group: Any, slot: int, param: Tensor, shown: ShownGrad | None = None) -> Any:
    """Have a trained parameter's gradient moved to its flat buffer once autograd has it; returns a handle.

    ``shown``: what ``param.grad`` is from then on; None: it stays None.
    """
    # Weak references: the garbage collector cannot follow a parameter's hooks. The module's hooks keep us alive.
    passes_ref, group_ref = weakref.ref(passes), weakref.ref(group)
    shown_ref = None if shown is None else weakref.ref(shown)
    shape, dtype = group.params.layout.slots[slot].shape, param.dtype

    def move_to_buffer(param: Tensor) -> None:
        passes, group, shown = passes_ref(), group_ref(), None if shown_ref is None else shown_ref()
        assert passes is not None and group is not None  # noqa: PT018
        grad: Any = param.grad
        if shown is not None and (type(grad) is not Tensor or grad.dtype != dtype or grad.shape != shape):
            grad = shown.take(param)
        else:
            param.grad = None  # before a backward begins, which applies what users have assigned there
        passes.expect_grad()
        group.grads.accumulate(slot, grad)
        if shown is not None:
            param.grad = shown.grad

    return param.register_post_accumulate_grad_hook(uncompiled(move_to_buffer))
