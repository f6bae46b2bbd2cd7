"""Units of a model, from what a user gives as ``units``, and models on the meta device.

Which parameter belongs to which unit: `zeroshard.zero.core.units`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from zeroshard.torch_internals import has_forward_hooks, not_saved, own_buffers, own_parameters, version_of
from zeroshard.unit_choice import UnitChoice, choose_units, is_container
from zeroshard.zero.core import units as by_module

Init = Callable[[str, torch.Tensor], None]


@runtime_checkable
class DrawsParts(Protocol):
    """An `Init` that can also fill a part of a parameter, so that each rank draws only its own shard."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        """Fill an entire buffer or parameter, in place."""
        ...

    def part(self, name: str, values: torch.Tensor, start: int, numel: int) -> None:
        """Fill ``values [n]``: the elements from ``start`` of a flattened parameter of ``numel`` elements.

        The values must depend neither on the rank nor on how many elements one call fills.
        """
        ...


class UnitSpec(by_module.UnitSpec):
    """A unit before its buffers exist."""

    @property
    def read_in_backward(self) -> bool:
        """Whether the module's backward reads its weights; the backward of a plain embedding lookup does not."""
        module = self.module
        plain = type(module) is nn.Embedding and list(own_parameters(module)) == ["weight"] and len(self.params) == 1
        return not plain or has_forward_hooks(module)


def partition(model: nn.Module, units: UnitChoice | None) -> tuple[UnitSpec, list[UnitSpec]]:
    """Return the root unit and the others, in the order given; a module that is given twice is one unit.

    Raises:
        TypeError: ``units`` holds something that is neither a module nor names one.
        ValueError: a name that is no class and no path of the model; a unit that is no submodule of the model, or
            that is never called (`nn.ModuleList`).
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    chosen = choose_units(model, units)
    for module in chosen:
        if module not in names:
            raise ValueError(f"units: a {type(module).__name__} is no submodule of the model; give its own submodules")
        if module is not model and is_container(module):
            raise ValueError(f"units: {names[module]!r} is a container that is never called; give its elements")
    root, *others = (UnitSpec(*spec) for spec in by_module.partition(model, chosen))
    return root, others


def materialise(model: nn.Module, device: torch.device, init: Init | None = None) -> set[nn.Parameter]:
    """Replace parameters on the meta device by placeholders without memory, and buffers on it by filled ones.

    Each placeholder is one NaN expanded to the parameter's shape, so a model too large for this rank can be filled
    unit by unit. Buffers are small, and ``init(name, tensor)`` fills them at once.

    Returns:
        The new parameters.

    Raises:
        ValueError: a buffer is on the meta device, and ``init`` does not fill it.
    """
    made: dict[nn.Parameter, nn.Parameter] = {}
    filled: dict[torch.Tensor, torch.Tensor] = {}
    for prefix, module in model.named_modules():
        for key, param in list(own_parameters(module).items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                nothing = torch.full((), float("nan"), dtype=param.dtype, device=device).expand(param.shape)
                made[param] = nn.Parameter(nothing, requires_grad=param.requires_grad)
            own_parameters(module)[key] = made[param]
        for key, buffer in list(own_buffers(module).items()):
            if buffer is not None and buffer.is_meta:
                if buffer not in filled:
                    name = f"{prefix}.{key}" if prefix else key
                    filled[buffer] = _filled(name, buffer, device, init)
                    if key in not_saved(module) and filled[buffer].isnan().any():  # no checkpoint will fill it
                        what = "the buffer is on the meta device, and `init` left NaN in it"
                        raise ValueError(f"{name}: {what}; {_TODO}")
                own_buffers(module)[key] = filled[buffer]
    return set(made.values())


_TODO = "have `init` fill it, or build buffers on a real device"


def _filled(name: str, buffer: torch.Tensor, device: torch.device, init: Init | None) -> torch.Tensor:
    if init is None:
        raise ValueError(f"{name}: the buffer is on the meta device; {_TODO}")
    made = torch.empty_like(buffer, device=device)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    version = version_of(made)
    try:
        with torch.no_grad():
            init(name, made)
    except LookupError as error:
        raise ValueError(f"{name}: the buffer is on the meta device, and `init` does not know it; {_TODO}") from error
    if version_of(made) == version:
        raise ValueError(f"{name}: the buffer is on the meta device, and `init` left it as it was; {_TODO}")
    return made
