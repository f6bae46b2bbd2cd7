"""The flat buffers that an engine would make of a model, as facts: what memory and traffic are computed from.

A model on the meta device will do: only names, shapes and dtypes are read, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.zero.layout import FlatLayout
from zeroshard.zero.partition import partition


@dataclass(frozen=True)
class Buffer:
    """Parameters of one unit and dtype, end to end.

    Attributes:
        unit: the unit's name; ``"root"`` for what no other unit holds.
        name: of the buffer: the unit's, and ``"unit#1"`` and so on for a unit's further ones.
        layout: where each parameter lies.
        dtype: of the parameters, and so of their masters.
        trained: whether they take gradients.
    """

    unit: str
    name: str
    layout: FlatLayout
    dtype: torch.dtype
    trained: bool


def buffers_of(model: nn.Module, world_size: int, units: Iterable[nn.Module] | None = None) -> list[Buffer]:
    """The buffers of ``model``, root first; ``units`` as `Zero` takes them, in the order in which they run."""
    root, specs = partition(model, units)
    buffers = []
    for spec in (root, *specs):
        shapes: dict[tuple[torch.dtype, bool], list[tuple[str, tuple[int, ...]]]] = {}
        for name, param in spec.params:
            shapes.setdefault((param.dtype, param.requires_grad), []).append((name, tuple(param.shape)))
        for index, ((dtype, trained), named) in enumerate(shapes.items()):
            name = f"{spec.name}#{index}" if index else spec.name
            buffers.append(Buffer(spec.name, name, FlatLayout.of(named, world_size), dtype, trained))
    return buffers
