"""The lab predicts a run's memory, traffic and time, at any stage, from the engine's own stage table and layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
    from zeroshard.lab.planner.plan import Plan, plan

__all__ = ["Plan", "plan"]


def __getattr__(name: str) -> Any:  # lazily: the command line reads the lab's settings before it needs torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded("zeroshard.lab.planner.plan", name)
