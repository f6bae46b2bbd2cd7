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
    call's hooks therefore fire once per backward pass, not once in their life. Which forward a call belonged to tells
    the turns of a unit apart where several forwards come before a backward.

[Note: Parts]
    A model may call the modules inside of a unit and not the unit. So every module that owns parameters has a hook,
    which does nothing while its unit runs; else it gathers the unit's weights and waits for them. Nobody will tell when
    backward is done with them: they stay until it is over.

[Note: Transforms]
    Inside `torch.func.grad`, `vmap` and the like a tensor stands for several, and torch refuses writes into buffers. So
    a unit that is called there is no call of ours: its weights must be readable already, and gradients are the
    transform's.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from zeroshard.zero.buffers.unit import Unit


class Listener(Protocol):
    """What the engine does about each event; ``forward_run`` is of the forward that the call belonged to."""

    def forward_begins(self, unit: Unit) -> None:
        """A unit's module is called."""
        ...

    def forward_ends(self, unit: Unit, *, grads_flow: bool, keep: bool) -> None:
        """It returns; ``keep``: nobody will tell when its weights are needed again."""
        ...

    def backward_begins(self, unit: Unit, forward_run: int | None) -> None:
        """Gradients have reached the outputs of a call; None: of one that was computed again in this backward."""
        ...

    def backward_ends(self, unit: Unit, forward_run: int | None) -> None:
        """Gradients have reached the inputs of a call."""
        ...

    @property
    def backward_pass(self) -> object:
        """The backward pass that is running; another object for each."""
        ...

    @property
    def forward_run(self) -> ForwardRun:
        """The forward that is running, or the last one."""
        ...

    def views(self, unit: Unit, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of the tensors that lie in the unit's weights, where these are freed after forward."""
        ...


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward."""
    return torch._C._current_graph_task_id() != -1


def in_transform() -> bool:
    """Whether this is called inside a transform of `torch.func`: grad, vmap, jvp and those that are made of them."""
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is not None


def require_readable(unit: Unit) -> None:
    """Raise RuntimeError where a unit that is called in a transform would have to gather its weights."""
    if unit.on_its_way or not unit.readable:
        raise RuntimeError(
            f"{unit.name}: weights cannot be gathered inside a transform of torch.func (grad, vmap, jvp); "
            "call the transform inside zero.full_params()"
        )


def attach(unit: Unit, listener: Listener, cast: torch.dtype | None) -> list[Any]:
    """Hook ``unit.module``; ``cast``: the dtype that floating-point inputs are cast to. Returns removable handles."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Before forward: the engine unshards weights; the inputs' gradients say when backward ends."""
        if in_transform():
            require_readable(unit)
            return _all_cast(args, kwargs, cast)
        listener.forward_begins(unit)
        if torch.is_grad_enabled() and not in_backward():
            # now: the module may change its inputs in place, or put its outputs into the container they came in
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad and t.grad_fn is not None]
            run = listener.forward_run
            index = run.index
            run.hook(inputs, _once_per_pass(listener, lambda: listener.backward_ends(unit, index)))
        return _all_cast(args, kwargs, cast)

    def begins_nested() -> None:
        listener.backward_begins(unit, None)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: listener.backward_ends(unit, None))

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After forward: the engine hears that the unit is done; the outputs' gradients say when backward begins."""
        if in_transform():
            return None
        returned, output = output, _outliving(listener, unit, output)
        if in_backward():
            outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
            event = _once_per_pass(listener, begins_nested)
            for tensor in outputs:
                tensor.register_hook(event)
        elif not torch.is_grad_enabled():
            listener.forward_ends(unit, grads_flow=False, keep=False)
        else:
            run = listener.forward_run
            inputs = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
            outputs = [t for t in tensors_in(output) if t.grad_fn is not None]
            # These hold ``run``, which so lives as long as a graph of this forward does.
            run.hook(outputs, _once_per_pass(listener, lambda: listener.backward_begins(unit, run.index)))
            # Gradients will flow, but no tensor of the output was found to tell us when: the weights must stay.
            keep = not outputs and bool(inputs or unit.trained_groups())
            listener.forward_ends(unit, grads_flow=bool(outputs), keep=keep)
        return None if output is returned else output

    return [
        unit.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        unit.module.register_forward_hook(after, with_kwargs=True),
    ]


def attach_parts(units: Iterable[Unit], model: nn.Module, part_begins: Callable[[Unit], None]) -> list[Any]:
    """Hook every module that owns parameters of a unit and is not its module: ``part_begins(unit)`` when it is called.

    So a model may call a unit's parts in its place. Compiled code knows no such hook: within a unit nothing is to be
    done, and outside of one weights are seen to be missing. Returns removable handles.
    """
    homes = {param: unit for unit in units for group in unit.groups for param in group.params.params}
    handles = []
    for module in model.modules():
        owners = dict.fromkeys(homes[param] for param in module.parameters(recurse=False) if param in homes)
        others = [unit for unit in owners if unit.module is not module]
        handles += [module.register_forward_pre_hook(_tells(part_begins, unit)) for unit in others]
    return handles


def _tells(part_begins: Callable[[Unit], None], unit: Unit) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        """Before the forward of a part that is called without its unit."""
        if in_transform():
            require_readable(unit)
        elif not torch.compiler.is_compiling() and not unit.inside:
            part_begins(unit)

    return before


class ForwardRun:
    """One forward of the model. The hooks on what its units returned hold it: it is gone when its graph is.

    Attributes:
        index: its number.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._hooked: dict[int, tuple[weakref.ref[Tensor], int, list[Callable[[Tensor], None]]]] = {}

    def hook(self, tensors: Iterable[Tensor], event: Callable[[Tensor], None]) -> None:
        """Call ``event`` when a gradient reaches one of the tensors; each has one hook, however many events it tells.

        A cache of keys and values goes through every block, and would have one hook for each of them.
        """
        for tensor in tensors:
            known = self._hooked.get(id(tensor))
            # after a change in place it is another tensor to autograd
            if known is not None and known[0]() is tensor and known[1] == tensor._version:
                known[2].append(event)
                continue
            events = [event]
            self._hooked[id(tensor)] = (weakref.ref(tensor), tensor._version, events)
            tensor.register_hook(partial(_tell, events))

    def ends(self) -> None:
        """The model has returned: forget which tensors have a hook, which hold what the hooks hold."""
        self._hooked = {}


def _tell(events: list[Callable[[Tensor], None]], grad: Tensor) -> None:
    for event in events:
        event(grad)


def _once_per_pass(listener: Listener, event: Callable[[], None]) -> Callable[[Tensor], None]:
    last: list[object] = [None]

    def hook(grad: Tensor) -> None:
        if last[0] is None or last[0] is not listener.backward_pass:
            event()
            last[0] = listener.backward_pass

    return hook


def _outliving(listener: Listener, unit: Unit, output: Any) -> Any:
    """``output``, with copies of tensors that lie in the unit's weights, which are about to be freed.

    Raises:
        RuntimeError: such a tensor is where it cannot be replaced.
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
    """What a pre-hook returns for arguments that are cast; None: they stay."""
    if dtype is None:
        return None
    return tuple(_cast(value, dtype) for value in args), {name: _cast(value, dtype) for name, value in kwargs.items()}


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
