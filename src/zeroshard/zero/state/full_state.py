"""Names and tensors of a model under an engine: full gradients, and names."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from zeroshard.zero.buffers.unit import gather_reduced
from zeroshard.zero.runtime.runtime import Runtime


def full_grads(model: nn.Module, runtime: Runtime) -> dict[str, Tensor | None]:
    """See `Zero.full_grads`."""
    found: dict[nn.Parameter, Tensor | None] = {}
    for group in runtime.groups():
        params = group.params
        if group.grads.reduced is None:
            found.update(dict.fromkeys(params.params))
            continue
        views = params.layout.views(gather_reduced(group))
        for param, view, used in zip(params.params, views, group.grads.used, strict=True):
            found[param] = view if used else None
    return {name: found.get(param) for name, param in model.named_parameters()}


def take_names(model: nn.Module, runtime: Runtime) -> None:
    """Give the engine's parameters the names that they have in the model now, and note those that have left it.

    Modules may have been moved, shared, wrapped or deleted since the engine was built.
    """
    names = {param: name for name, param in model.named_parameters()}
    for params in (group.params for group in runtime.groups()):
        slots = params.layout.slots
        named = tuple(names.get(param, slot.name) for slot, param in zip(slots, params.params, strict=True))
        if named != tuple(slot.name for slot in slots):
            slots = tuple(replace(slot, name=name) for slot, name in zip(slots, named, strict=True))
            params.layout = replace(params.layout, slots=slots)
        params.absent = frozenset(params.params) - names.keys()
