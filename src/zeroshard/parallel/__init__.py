"""Data-parallel strategies by name: ours (``zero0`` to ``zero3``) and PyTorch's own.

`zeroshard.parallel.registry` has the table. Classes are loaded on first use, so that the command line can be parsed
without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.parallel.base import Setup as Setup
    from zeroshard.parallel.base import Strategy as Strategy
    from zeroshard.parallel.ddp import Ddp as Ddp
    from zeroshard.parallel.registry import STRATEGIES as STRATEGIES
    from zeroshard.parallel.registry import StrategyEntry as StrategyEntry
    from zeroshard.parallel.registry import build_strategy as build_strategy
    from zeroshard.parallel.registry import strategies_with as strategies_with
    from zeroshard.parallel.registry import strategy_entry as strategy_entry
    from zeroshard.parallel.zero import ZeroStrategy as ZeroStrategy

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
