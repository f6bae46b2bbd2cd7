"""What the experiment has answered, once for a class and its settings."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from zeroshard.optimizer_classes.reach import OptimizerKind
from zeroshard.reach_probe.probe import LEARNING_RATE, probe

_lock = threading.Lock()  # ranks may be threads, which share the random generators that a probe seeds and restores
_known: weakref.WeakKeyDictionary[type[Optimizer], dict[Any, OptimizerKind]] = weakref.WeakKeyDictionary()


def found_by_probe(
    optimizer_cls: type[Optimizer], settings: Mapping[str, Any], group: Mapping[str, Any], device: torch.device
) -> OptimizerKind:
    """As `probe`, whose arguments and errors these are; the answer is cached if settings are plain values."""
    if isinstance(group.get("lr"), int | float):
        group = {**group, "lr": LEARNING_RATE}  # groups that differ in lr alone share one answer
    with _lock:
        known = _known.setdefault(optimizer_cls, {})
        try:
            key = (_plain(settings), _plain(group), device.type == "cpu")
        except TypeError:
            return probe(optimizer_cls, settings, group, device)
        if key not in known:
            known[key] = probe(optimizer_cls, settings, group, device)
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
