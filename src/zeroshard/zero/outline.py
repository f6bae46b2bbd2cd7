"""What a state has beside tensors: which names are one tensor, and the settings of the optimizer's groups.

A checkpoint keeps it, so that ordinary state dicts can be made of one without the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

_NAMES = ("params", "param_names")


@dataclass(frozen=True)
class Outline:
    """The same on every rank.

    Attributes:
        tied: each further name of a tensor -> its first name, under which it is saved.
        param_groups: the settings of each group as JSON can hold them (a number for a scalar tensor, a list for a
            tuple; what it cannot hold is left out), and under ``"params"`` the names of its parameters.
    """

    tied: dict[str, str] = field(default_factory=dict)
    param_groups: list[dict[str, Any]] = field(default_factory=list)


@runtime_checkable
class Outlined(Protocol):
    """What can tell its outline."""

    def outline(self) -> Outline:
        """The names and settings of now."""
        ...


def make_outline(
    named: Mapping[str, Tensor], groups: Iterable[tuple[Mapping[str, Any], Iterable[Tensor]]]
) -> Outline:
    """An outline of tensors by all of their names, and of param groups with the model's parameters in each."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, tensor in named.items():
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    outlined = []
    for settings, params in groups:
        kept = {key: _plain(value) for key, value in settings.items() if key not in _NAMES and _is_plain(value)}
        outlined.append({**kept, "params": [first[id(param)] for param in params]})
    return Outline(tied, outlined)


def _is_plain(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
