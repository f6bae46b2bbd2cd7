"""Data-parallel strategies by name: ours (``zero0`` to ``zero3``) and PyTorch's own.

`zeroshard.parallel.registry` has the table. Classes are loaded on first use, so that the command line can be parsed
without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded
from zeroshard.parallel.registry import STRATEGIES, StrategyEntry, build_strategy, strategies_with, strategy_entry

if TYPE_CHECKING:
    from zeroshard.parallel.base import Setup, Strategy
    from zeroshard.parallel.ddp import Ddp
    from zeroshard.parallel.zero import ZeroStrategy

_HOME = {"Ddp": "ddp", "Setup": "base", "Strategy": "base", "ZeroStrategy": "zero"}

__all__ = [
    "STRATEGIES",
    "Ddp",
    "Setup",
    "Strategy",
    "StrategyEntry",
    "ZeroStrategy",
    "build_strategy",
    "strategies_with",
    "strategy_entry",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
