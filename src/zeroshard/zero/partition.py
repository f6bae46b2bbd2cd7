"""Which parameter belongs to which unit.

A parameter belongs to the innermost unit module that contains it; one that several units share (tied weights) or
that none contains goes to the root unit, whose weights are whole for the length of a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass
class UnitSpec:
    """A unit before its buffers exist: the module whose calls use it, and its parameters by name."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def default_units(model: nn.Module) -> list[nn.Module]:
    """The children of each outermost `nn.ModuleList`: the repeated blocks of nearly every model; [] without one."""
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                found.extend(child)
            else:
                walk(child)

    walk(model)
    return found


def partition(model: nn.Module, units: Iterable[nn.Module] | None) -> tuple[UnitSpec, list[UnitSpec]]:
    """The root unit and the others, in the order given.

    Raises:
        TypeError: ``units`` holds something that is not a module.
        ValueError: a unit that is no submodule of the model, or that is never called (`nn.ModuleList`).
    """
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    chosen = default_units(model) if units is None else list(units)
    specs: dict[nn.Module, UnitSpec] = {}
    for module in chosen:
        if not isinstance(module, nn.Module):
            raise TypeError(f"units: {type(module).__name__} is not an nn.Module; give submodules of the model")
        if module not in names:
            raise ValueError(f"units: a {type(module).__name__} is no submodule of the model; give its own submodules")
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"units: {names[module]!r} is a container that is never called; give its elements")
        if module is not model:
            specs.setdefault(module, UnitSpec(names[module], module))
    root = UnitSpec("root", model)
    homes = _homes(model, specs, root)
    for name, param in model.named_parameters():
        homes[param].params.append((name, param))
    return root, [spec for spec in specs.values() if spec.params]


def _homes(model: nn.Module, specs: dict[nn.Module, UnitSpec], root: UnitSpec) -> dict[nn.Parameter, UnitSpec]:
    homes: dict[nn.Parameter, UnitSpec] = {}
    visited: set[tuple[nn.Module, str]] = set()

    def walk(module: nn.Module, home: UnitSpec) -> None:
        home = specs.get(module, home)
        if (module, home.name) in visited:
            return
        visited.add((module, home.name))
        for param in module.parameters(recurse=False):
            homes[param] = home if homes.get(param, home) is home else root
        for child in module.children():
            walk(child, home)

    walk(model, root)
    return homes


def materialise(model: nn.Module, device: torch.device) -> set[nn.Parameter]:
    """Replace parameters on the meta device by ones on ``device`` that have a shape and, as yet, no memory.

    Each is one NaN expanded to its shape, so that a model too large for this rank can be filled unit by unit.

    Returns:
        The new parameters.

    Raises:
        ValueError: a buffer is on the meta device.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"{name}: the buffer is on the meta device; build buffers on a real one")
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for key, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            if param not in made:
                nothing = torch.full((), float("nan"), dtype=param.dtype, device=device).expand(param.shape)
                made[param] = nn.Parameter(nothing, requires_grad=param.requires_grad)
            module._parameters[key] = made[param]
    return set(made.values())
