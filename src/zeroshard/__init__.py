"""zeroshard: memory-efficient data-parallel training of language models in PyTorch.

The public names are loaded on first use, so that ``zeroshard --help`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zeroshard.checkpoint import consolidate, load, save
    from zeroshard.comm import Communicator
    from zeroshard.zero import STAGES, FlatLayout, MixedPrecision, ShardedOptimizer, ShardingStrategy, Zero

_HOME = {
    "Communicator": "zeroshard.comm",
    "FlatLayout": "zeroshard.zero",
    "MixedPrecision": "zeroshard.zero",
    "STAGES": "zeroshard.zero",
    "ShardedOptimizer": "zeroshard.zero",
    "ShardingStrategy": "zeroshard.zero",
    "Zero": "zeroshard.zero",
    "consolidate": "zeroshard.checkpoint",
    "load": "zeroshard.checkpoint",
    "save": "zeroshard.checkpoint",
}

__all__ = [
    "STAGES",
    "Communicator",
    "FlatLayout",
    "MixedPrecision",
    "ShardedOptimizer",
    "ShardingStrategy",
    "Zero",
    "__version__",
    "consolidate",
    "load",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(_HOME[name], name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
