"""Which parameter belongs to which unit.

A parameter belongs to the innermost unit module that contains it. One that several units share (tied weights), or that
no unit contains, belongs to the root unit, whose weights stay unsharded from a forward until its backward is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class UnitSpec(NamedTuple):
    """A unit before its buffers exist: the module whose calls use it, and its parameters by name."""

    name: str
    module: nn.Module
    params: list[tuple[str, nn.Parameter]]


def partition(model: nn.Module, units: Iterable[nn.Module]) -> list[UnitSpec]:
    """Return the root unit, then one for each of the submodules ``units`` that has parameters, in the order given."""
    names = {module: name for name, module in reversed(list(model.named_modules()))}
    root = UnitSpec("root", model, [])
    specs = {module: UnitSpec(names[module], module, []) for module in units if module is not model}
    homes: dict[nn.Parameter, UnitSpec] = {}
    visited: set[tuple[nn.Module, str]] = set()

    def walk(module: nn.Module, home: UnitSpec) -> None:
        home = specs.get(module, home)
        if (module, home.name) in visited:  # a module may be registered in several places
            return
        visited.add((module, home.name))
        for param in module.parameters(recurse=False):
            homes[param] = home if homes.get(param, home) is home else root
        for child in module.children():
            walk(child, home)

    walk(model, root)
    for name, param in model.named_parameters():
        homes[param].params.append((name, param))
    return [root, *(spec for spec in specs.values() if spec.params)]
