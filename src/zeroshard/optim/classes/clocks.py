"""The clocks of an optimizer: the numbers in it that count its steps, and by which it may begin something new later.

Published optimizers clip by the norm of a tensor once their statistics have warmed up, or precondition from a later
step on. A trial of a few steps would not see it. So the trial puts the clocks forward (`Clocks.set`): to the steps
around each whole number among the settings, and far beyond any warm-up.

A clock is a number that grew by one in every step so far, wherever the class keeps it: in its param groups, in the
state of its parameters, in an attribute or a dict there. A class that keeps anything else in attributes than plain
values, tensors and containers of them may have clocks that nobody finds (`Clocks.hidden`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

FAR = (1_000, 1_000_000)  # steps beyond the warm-up that a class has without a setting
AROUND = 2  # how many steps before a setting's number the clocks are put
MOST = 10_000_000  # a larger whole number is no number of steps
MOST_SETTINGS = 8
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, Tensor)
_LISTS = (list, tuple, set, frozenset)
_DEPTH = 3  # of dicts, lists and objects in attributes
_TORCHS = frozenset({"defaults", "state", "param_groups"})
_OF_TORCH = ("_optimizer_", "_zero_grad_profile", "_warned_capturable")  # attributes that `Optimizer` sets itself


class _Number(NamedTuple):
    """A number that an optimizer keeps: where it is, by a name that all parameters share, and how to get there."""

    where: tuple[str, str]
    container: MutableMapping[Any, Any]
    key: Any

    @property
    def value(self) -> float:
        return float(self.container[self.key])

    @property
    def is_whole(self) -> bool:
        return self.value == self.value // 1 and not isinstance(self.container[self.key], Tensor)

    def advance(self, amount: int) -> None:
        value = self.container[self.key]
        self.container[self.key] = value + amount


class Clocks:
    """Watches the numbers of an optimizer from step to step; those that count steps are its clocks."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], list[float]] = {}
        self._counting: dict[tuple[str, str], bool] = {}
        self._lengths: list[list[int]] = []  # of the containers in attributes, after each step

    def tick(self, optimizer: Optimizer) -> None:
        """Look at the numbers after a step."""
        now: dict[tuple[str, str], list[float]] = {}
        for number in _numbers(optimizer):
            now.setdefault(number.where, []).append(number.value)
        for where, values in now.items():
            before = self._last.get(where)
            if before is not None and len(before) == len(values):
                grew = all(new - old == 1 for new, old in zip(values, before, strict=True))
                self._counting[where] = self._counting.get(where, True) and grew
        self._last = now
        self._lengths.append([len(value) for _, value in _attributes(optimizer) if isinstance(value, (*_LISTS, dict))])

    @property
    def found(self) -> bool:
        """Whether there is any."""
        return any(self._counting.values())

    def hidden(self, optimizer: Optimizer) -> bool:
        """Whether there may be others: an attribute is not plain, or a container that becomes longer and longer."""
        alike = [lengths for lengths in self._lengths if len(lengths) == len(self._lengths[-1])]
        longer = any(all(a < b for a, b in pairwise(column)) for column in zip(*alike, strict=True))
        return longer or not all(_is_plain(value, _DEPTH) for _, value in _attributes(optimizer))

    def settings(self, optimizer: Optimizer) -> list[int]:
        """Return the whole numbers among the optimizer's settings and attributes that may be numbers of steps."""
        values = {
            int(number.value)
            for number in _numbers(optimizer)
            if not self._counting.get(number.where) and number.where[0] != "state" and number.is_whole
        }
        return sorted(value for value in values if AROUND < value <= MOST)[:MOST_SETTINGS]

    def set(self, optimizer: Optimizer, to: int) -> None:
        """Put all clocks forward by as much as it takes the one that is furthest to show ``to``."""
        clocks = [number for number in _numbers(optimizer) if self._counting.get(number.where)]
        amount = to - int(max((clock.value for clock in clocks), default=to))
        for clock in clocks if amount > 0 else ():
            clock.advance(amount)
        self._last = {}


def _numbers(optimizer: Optimizer) -> Iterator[_Number]:
    for group in optimizer.param_groups:
        yield from _in("group", group, 1, skip=("params", "lr", "param_names"))
    for key, value in list(optimizer.state.items()):
        if isinstance(value, MutableMapping):
            yield from _in("state", value, 0)
        elif isinstance(key, str) and _is_number(value):
            yield _Number(("state", key), optimizer.state, key)
    own = vars(optimizer)
    for name, _ in _attributes(optimizer):
        yield from _in("attribute", own, _DEPTH, only=name)


def _in(
    kind: str, container: MutableMapping[Any, Any], depth: int, *, skip: Iterable[str] = (), only: str | None = None
) -> Iterator[_Number]:
    for key in [only] if only is not None else [key for key in container if key not in skip]:
        value = container[key]
        if _is_number(value):
            yield _Number((kind, str(key)), container, key)
        elif depth and (inside := _entries(value)) is not None:
            yield from _in(f"{kind}.{key}", inside, depth - 1)


def _attributes(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Attributes that the class itself has set, and not torch's `Optimizer`."""
    for name, value in list(vars(optimizer).items()):
        if name not in _TORCHS and not name.startswith(_OF_TORCH):
            yield name, value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**53


def _is_plain(value: Any, depth: int) -> bool:
    if isinstance(value, _PLAIN):
        return True
    entries = _entries(value)
    inside = value if isinstance(value, _LISTS) else None if entries is None else entries.values()
    return bool(depth) and inside is not None and all(_is_plain(each, depth - 1) for each in inside)


def _entries(value: Any) -> MutableMapping[Any, Any] | None:
    """The entries of a dict, or the attributes of an object of a class in Python; None for anything else."""
    if isinstance(value, MutableMapping):
        return value
    own = getattr(value, "__dict__", None)
    opaque = isinstance(value, type | Optimizer | Tensor | ModuleType) or callable(value)
    return own if isinstance(own, dict) and not opaque else None
