"""The hooks of units' modules beyond those of the core (`zeroshard.zero.core.hooks`), and of modules inside of units.

[Note: Recomputation]
    Activation checkpointing runs a unit's forward again inside backward, and may leave it by an exception once it
    has recomputed enough. Such a forward must gather the weights but never free them: the backward that asked for it
    comes next. `in_backward` tells it from an ordinary forward. Reentrant checkpointing then runs a backward of its
    own, nested in the first, through what it recomputed. Its inputs are leaves, whose gradients may arrive before
    everything inside is done, so such a call ends when the nested backward ends.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

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
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.core.hooks import UnitHooks, once_per_pass

NO_COPY = (
    "copy.deepcopy(model): the copy would drive this model's engine; copy it before Zero(), "
    "use zero.ema() for an average of its weights, or load zero.state_dict() into a new one"
)


def require_readable(unit: Unit) -> None:
    """Raise RuntimeError if a unit that is called in a transform would have to gather its weights."""
    if unit.gather_in_flight or not unit.readable:
        raise RuntimeError(
            f"{unit.name}: weights cannot be gathered inside a transform of torch.func (grad, vmap, jvp); "
            "call the transform inside zero.full_params()"
        )


class ModuleHooks(UnitHooks):
    """The hooks of one unit's module: those of the core, and what this module's docstring says."""

    passes: Any  # the `Runtime`, or another listener with its methods

    def attach(self) -> list[Any]:
        """Hook the module; returns removable handles."""
        hook, module = _unit_hook(), self.unit.module
        return [
            module.register_forward_pre_hook(hook(self.before), with_kwargs=True, prepend=True),
            module.register_forward_hook(hook(self.after), with_kwargs=True),
        ]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before forward: have the engine unshard weights, and hook the inputs, whose gradients end the backward."""
        if in_transform():  # [Note: Transforms]
            require_readable(self.unit)
        elif in_backward():  # [Note: Recomputation]
            self.passes.pre_forward(self.unit)
        else:
            return super().before(module, args, kwargs)
        return self.cast_inputs(args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """After forward: report that the unit is done, and hook the outputs, whose gradients begin the backward."""
        if in_transform():
            return None
        unit, passes, forward = self.unit, self.passes, self.passes.forward
        returned, output = output, _outliving(passes, unit, output)
        inputs = tensors_in((*args, *kwargs.values()))
        if in_backward():  # [Note: Recomputation]
            event = uncompiled(once_per_pass(passes, self._begins_nested))
            for tensor in _with_bases(tensors_in(output), inputs):
                tensor.register_hook(event)
        elif not torch.is_grad_enabled():
            passes.post_forward(unit, grads_flow=False, keep_unsharded=False)
        else:
            inputs = [t for t in inputs if t.requires_grad]
            outputs = _with_bases(tensors_in(output), inputs)
            # The hooks refer to ``forward``, so it lives as long as a graph of this forward does.
            forward.hook(outputs, once_per_pass(passes, lambda: passes.pre_backward(unit, forward)))
            # Gradients will flow, but no tensor of the output was found to tell us when: the weights must stay.
            keep_unsharded = not outputs and bool(inputs or unit.trained_groups())
            passes.post_forward(unit, grads_flow=bool(outputs), keep_unsharded=keep_unsharded)
        return None if output is returned else output

    def _begins_nested(self) -> None:
        self.passes.pre_backward(self.unit, None)
        at_end_of_backward(uncompiled(lambda: self.passes.post_backward(self.unit, None)))

    def with_graph(self, value: Any) -> list[Tensor]:
        """The tensors with a graph in containers, dataclasses and plain objects, each once."""
        return [tensor for tensor in tensors_in(value) if tensor.grad_fn is not None]

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """The arguments in the dtype ``cast``; a container whose tensors all have it is itself, not a copy."""
        dtype = self.cast
        if dtype is None:
            return None
        return tuple(cast(arg, dtype) for arg in args), {name: cast(arg, dtype) for name, arg in kwargs.items()}


def attach_parts(
    units: Iterable[Unit], hooked: Sequence[Unit], model: nn.Module, pre_forward_of_part: Callable[[Unit], None]
) -> list[Any]:
    """Hook modules that own parameters of a unit to call ``pre_forward_of_part`` first; not those of ``hooked`` units.

    So a model may call a unit's submodules instead of the unit. In compiled code the hook is traced: inside of the unit
    it adds nothing to the graph, and outside of it the graph ends before ``pre_forward_of_part``; see
    [Note: Hooks inside of a unit] in `uncompiled`. Returns removable handles.
    """
    homes = {param: unit for unit in units for group in unit.groups for param in group.params.params}
    handles, pre_forward_of_part = [], uncompiled(pre_forward_of_part)
    for module in model.modules():
        owners = dict.fromkeys(homes[param] for param in module.parameters(recurse=False) if param in homes)
        others = [unit for unit in owners if unit.module is not module or unit not in hooked]
        handles += [module.register_forward_pre_hook(_PartHook(pre_forward_of_part, unit)) for unit in others]
    return handles


def modules_with_methods(model: nn.Module, root: Unit, units: Sequence[Unit]) -> list[nn.Module]:
    """The modules of the units, and those outside of ``units`` that own parameters.

    They are the model's modules of [Note: Modules with methods of ours] in `module_methods`.
    """
    inside = {part for unit in units for part in unit.module.modules()}
    others = (part for part in model.modules() if part not in inside and [*part.parameters(recurse=False)])
    return list(dict.fromkeys([*(unit.module for unit in (root, *units)), *others]))


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


def _outliving(runtime: Any, unit: Unit, output: Any) -> Any:
    """Return ``output`` with clones of tensors that share storage with the unit's weights, which will be freed.

    Raises:
        RuntimeError: such a tensor is inside an object, where it cannot be replaced.
    """
    views = {id(tensor) for tensor in runtime.views(unit, tensors_in(output))}
    if not views:
        return output
    output = tree_map(lambda leaf: leaf.clone() if id(leaf) in views else leaf, output)
    if runtime.views(unit, tensors_in(output)):
        raise RuntimeError(
            f"{unit.name}: it returns a view of its own weights inside an object, and they are freed after forward; "
            "return a clone"
        )
    return output


# -- tensors in the arguments and outputs of modules: in containers, dataclasses and plain objects ------------------


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with its floating-point tensors in ``dtype``: ``value`` itself, not a copy, if they all are."""

    def is_other(leaf: Any) -> bool:
        return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != dtype

    if not any(map(is_other, tree_leaves(value))):
        return value
    return tree_map(lambda leaf: leaf.to(dtype) if is_other(leaf) else leaf, value)


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
