"""What the experiment has answered, once for a class and its settings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.optim.classes.experiment import LEARNING_RATE
from zeroshard.optim.classes.probe import DECIDED, probe, probe_as_used
from zeroshard.optim.classes.reach import OptimizerKind
from zeroshard.optim.classes.trials import isolated

_known: weakref.WeakKeyDictionary[type[Optimizer], dict[Any, OptimizerKind]] = weakref.WeakKeyDictionary()


def found_by_probe(
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> OptimizerKind:
    """As `probe` and `probe_as_used`, whose arguments and errors these are; cached if settings are plain values."""
    with isolated():  # threads that ask for the same class wait for the first one's answer
        rate = {"lr": LEARNING_RATE} if isinstance(group.get("lr"), int | float) else {}
        # groups that differ in lr alone share this answer
        found = _answer(probe, optimizer_cls, settings, {**group, **rate}, device)
        if found.reach in DECIDED:
            return found
        return _answer(probe_as_used, optimizer_cls, settings, group, device, dtype, found)


def _answer(
    ask: Callable[..., OptimizerKind],
    optimizer_cls: type[Optimizer],
    settings: Mapping[str, Any],
    group: Mapping[str, Any],
    device: torch.device,
    *used: Any,
) -> OptimizerKind:
    known = _known.setdefault(optimizer_cls, {})
    try:
        key = (ask, _plain(settings), _plain(group), device.type == "cpu", *used)
    except TypeError:
        return ask(optimizer_cls, settings, group, device, *used)
    if key not in known:
        known[key] = ask(optimizer_cls, settings, group, device, *used)
    return known[key]


def _plain(value: Any) -> Any:
    """A hashable stand-in for plain settings; TypeError for others."""
    if isinstance(value, Mapping):
        return tuple((key, _plain(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return type(value), value
    raise TypeError(f"{type(value).__name__} is no plain value")
