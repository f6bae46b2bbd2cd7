"""Hooks by which the engine learns when the forward and the backward of each unit begin and end.

Module hooks tell when a unit's forward begins and ends. Hooks on the tensors that go in and come out tell when its
backward ends and begins: a call's outputs receive their gradients before anything inside runs backward, and its inputs
receive theirs after everything inside has. `grad_hooks` hooks the parameters themselves.

[Note: Recomputation]
    Activation checkpointing runs a unit's forward again inside backward, and may leave it by an exception once it
    has recomputed enough. Such a forward must gather the weights but never free them: the backward that asked for it
    comes next. `in_backward` tells it from an ordinary forward. Reentrant checkpointing then runs a backward of its
    own, nested in the first, through what it recomputed. Its inputs are leaves, whose gradients may arrive before
    everything inside is done, so such a call ends when the nested backward ends.

[Note: Which call]
    A module may be called several times before one backward, and the same graph may be run backward twice. So each
    call's hooks fire once per backward pass, not once altogether. If one backward goes through several forwards, a
    unit's calls are told apart by the number of the forward that each belonged to.

[Note: Parts]
    A model may call submodules of a unit without calling the unit. So every module that owns parameters has a hook. It
    does nothing while the unit itself runs; else it gathers the unit's weights and waits for them. No hook tells when
    backward has used such weights for the last time: they stay unsharded until the whole backward is over.

[Note: Transforms]
    Inside `torch.func.grad`, `vmap` and the like a tensor stands for several, and torch refuses writes into buffers. So
    the engine ignores a unit's call there: the unit's weights must be readable already, and the transform keeps the
    gradients.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zeroshard.torch_internals import (
    at_end_of_backward,
    base_of,
    in_backward,
    in_transform,
    tree_leaves,
    tree_map,
    version_of,
)
from zeroshard.uncompiled import uncompiled
from zeroshard.zero.buffers.outdated import NO_COPY
from zeroshard.zero.buffers.unit import Unit


class Listener(Protocol):
    """Receives the events; ``forward_run`` is the number of the model's forward that the call belonged to."""

    def pre_forward(self, unit: Unit) -> None:
        """A unit's module is called."""
        ...

    def post_forward(self, unit: Unit, *, grads_flow: bool, keep_unsharded: bool) -> None:
        """The unit's module returns. ``keep_unsharded``: no hook will tell when its weights are needed again."""
        ...

    def pre_backward(self, unit: Unit, forward_run: int | None) -> None:
        """Gradients have reached the outputs of a call; ``forward_run``: None for a call recomputed in backward."""
        ...

    def post_backward(self, unit: Unit, forward_run: int | None) -> None:
        """Gradients have reached the inputs of a call; ``forward_run`` is None for a recomputed one."""
        ...

    @property
    def backward_pass(self) -> object:
        """The backward pass that is running; each pass is a new object."""
        ...

    @property
    def forward_run(self) -> ForwardRun:
        """The forward that is running, or the last one."""
        ...

    def views(self, unit: Unit, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of the tensors that share storage with the unit's weights, if these are freed after forward."""
        ...


def require_readable(unit: Unit) -> None:
    """Raise RuntimeError if a unit that is called in a transform would have to gather its weights."""
    if unit.gather_in_flight or not unit.readable:
        raise RuntimeError(
            f"{unit.name}: weights cannot be gathered inside a transform of torch.func (grad, vmap, jvp); "
            "call the transform inside zero.full_params()"
        )


def attach(unit: Unit, listener: Listener, cast: torch.dtype | None) -> list[Any]:
    """Hook ``unit.module``; ``cast``: the dtype that floating-point inputs are cast to. Returns removable handles."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Before forward: have the engine unshard weights, and hook the inputs, whose gradients end the backward."""
        if in_transform():  # [Note: Transforms]
            require_readable(unit)
            return _all_cast(args, kwargs, cast)
        listener.pre_forward(unit)
        if torch.is_grad_enabled() and not in_backward():
            # Hook them now: the module may change its inputs in place, or put its outputs into the same container.
            inputs = [t for t in _tensors_of(args, kwargs) if t.requires_grad and t.grad_fn is not None]
            run = listener.forward_run
            index = run.index
            run.hook(inputs, _once_per_pass(listener, lambda: listener.post_backward(unit, index)))
        return _all_cast(args, kwargs, cast)

    def begins_nested() -> None:
        listener.pre_backward(unit, None)
        at_end_of_backward(uncompiled(lambda: listener.post_backward(unit, None)))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After forward: report that the unit is done, and hook the outputs, whose gradients begin the backward."""
        if in_transform():
            return None
        returned, output = output, _outliving(listener, unit, output)
        if in_backward():  # [Note: Recomputation]
            event = uncompiled(_once_per_pass(listener, begins_nested))
            for tensor in _with_bases(tensors_in(output), _tensors_of(args, kwargs)):
                tensor.register_hook(event)
        elif not torch.is_grad_enabled():
            listener.post_forward(unit, grads_flow=False, keep_unsharded=False)
        else:
            run = listener.forward_run
            inputs = [t for t in _tensors_of(args, kwargs) if t.requires_grad]
            outputs = _with_bases(tensors_in(output), inputs)
            # The hooks refer to ``run``, so it lives as long as a graph of this forward does.
            run.hook(outputs, _once_per_pass(listener, lambda: listener.pre_backward(unit, run.index)))
            # Gradients will flow, but no tensor of the output was found to tell us when: the weights must stay.
            keep_unsharded = not outputs and bool(inputs or unit.trained_groups())
            listener.post_forward(unit, grads_flow=bool(outputs), keep_unsharded=keep_unsharded)
        return None if output is returned else output

    hook = _unit_hook()
    return [
        unit.module.register_forward_pre_hook(hook(before), with_kwargs=True, prepend=True),
        unit.module.register_forward_hook(hook(after), with_kwargs=True),
    ]


def attach_parts(units: Iterable[Unit], model: nn.Module, pre_forward_of_part: Callable[[Unit], None]) -> list[Any]:
    """Hook each module, but the units' own, that owns parameters of a unit, to call ``pre_forward_of_part`` first.

    So a model may call a unit's submodules instead of the unit. In compiled code the hook is traced: inside of the unit
    it adds nothing to the graph, and outside of it the graph ends before ``pre_forward_of_part``; see
    [Note: Hooks inside of a unit] in `uncompiled`. Returns removable handles.
    """
    homes = {param: unit for unit in units for group in unit.groups for param in group.params.params}
    handles, pre_forward_of_part = [], uncompiled(pre_forward_of_part)
    for module in model.modules():
        owners = dict.fromkeys(homes[param] for param in module.parameters(recurse=False) if param in homes)
        others = [unit for unit in owners if unit.module is not module]
        handles += [module.register_forward_pre_hook(_PartHook(pre_forward_of_part, unit)) for unit in others]
    return handles


class EngineHook:
    """A module's hook that belongs to one engine: it, and so the module, can be neither copied nor pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError(NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeError(
            "torch.save(model), pickle: the model holds this rank's engine; save zero.state_dict(), or everything by "
            "zeroshard.save()"
        )


@cache
def _unit_hook() -> Any:  # a class; made late, because `uncompiled` imports the compiler
    class UnitHook(EngineHook):
        """Runs a function before or after the forward of a unit."""

        def __init__(self, run: Callable[..., Any]) -> None:
            self._run = run

        @uncompiled
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Run the function."""
            return self._run(*args, **kwargs)

    return UnitHook


class _PartHook(EngineHook):
    def __init__(self, pre_forward_of_part: Callable[[Unit], None], unit: Unit) -> None:
        self._pre_forward, self._unit = pre_forward_of_part, unit

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward of a part: report it, unless the unit's own forward is running."""
        if self._unit.entered:  # nearly always, and then its weights are unsharded
            return
        if in_transform():
            require_readable(self._unit)
        else:
            self._pre_forward(self._unit)


class ForwardRun:
    """One forward of the model. Hooks on the outputs of its units refer to it, so it is freed with its graph.

    Attributes:
        index: the number of the forward.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._hooked: dict[int, tuple[weakref.ref[Tensor], int, list[Callable[[Tensor], None]]]] = {}

    def hook(self, tensors: Iterable[Tensor], event: Callable[[Tensor], None]) -> None:
        """Call ``event`` when a gradient reaches one of the tensors. A tensor gets one hook for all of its events.

        A key-value cache goes through every block, and would otherwise get one hook from each of them.
        """
        for tensor in tensors:
            known = self._hooked.get(id(tensor))
            # after an in-place change an earlier hook sees the gradient of the old value only
            if known is not None and known[0]() is tensor and known[1] == version_of(tensor):
                known[2].append(event)
                continue
            events = [event]
            self._hooked[id(tensor)] = (weakref.ref(tensor), version_of(tensor), events)
            tensor.register_hook(partial(_teller(), events))

    def ends(self) -> None:
        """The model has returned: drop the list of hooked tensors, whose events refer back to this object."""
        self._hooked = {}


def _tell(events: list[Callable[[Tensor], None]], grad: Tensor) -> None:
    for event in events:
        event(grad)


@cache
def _teller() -> Callable[[list[Callable[[Tensor], None]], Tensor], None]:
    return uncompiled(_tell)


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


def _once_per_pass(listener: Listener, event: Callable[[], None]) -> Callable[[Tensor], None]:
    last: list[object] = [None]

    def hook(grad: Tensor) -> None:
        if last[0] is None or last[0] is not listener.backward_pass:
            event()
            last[0] = listener.backward_pass

    return hook


def _outliving(listener: Listener, unit: Unit, output: Any) -> Any:
    """Return ``output`` with clones of tensors that share storage with the unit's weights, which will be freed.

    Raises:
        RuntimeError: such a tensor is inside an object, where it cannot be replaced.
    """
    views = {id(tensor) for tensor in listener.views(unit, tensors_in(output))}
    if not views:
        return output
    output = tree_map(lambda leaf: leaf.clone() if id(leaf) in views else leaf, output)
    if listener.views(unit, tensors_in(output)):
        raise RuntimeError(
            f"{unit.name}: it returns a view of its own weights inside an object, and they are freed after forward; "
            "return a clone"
        )
    return output


def _all_cast(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> tuple[Any, Any] | None:
    """Return the arguments cast to ``dtype``, as a pre-hook returns them; None: they stay as they are."""
    if dtype is None:
        return None
    return tuple(_cast(value, dtype) for value in args), {name: _cast(value, dtype) for name, value in kwargs.items()}


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``: ``value`` itself, not a copy, if they all are."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not any(map(is_other, tree_leaves(value))):
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, value)


def _tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    return tensors_in((args, kwargs) if kwargs else args)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in a structure of containers, dataclasses and plain objects; each once."""
    if isinstance(value, Tensor):
        yield value
        return
    if type(value) is tuple and all(leaf is None or isinstance(leaf, Tensor) for leaf in value):  # most arguments
        yield from {id(leaf): leaf for leaf in value if leaf is not None}.values()
        return
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
