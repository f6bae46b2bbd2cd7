"""Tensors in the arguments and outputs of modules: in containers, dataclasses and plain objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.host.torch_internals import tree_leaves, tree_map


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
