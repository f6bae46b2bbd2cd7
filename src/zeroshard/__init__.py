"""zeroshard: memory-efficient data-parallel training of language models in PyTorch.

The public names are loaded on first use, so that ``zeroshard --help`` does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names
from zeroshard.host.moved import keep_earlier_paths

__version__ = "0.1.0"

if TYPE_CHECKING:
    from zeroshard.checkpoint import consolidate as consolidate
    from zeroshard.checkpoint import load as load
    from zeroshard.checkpoint import save as save
    from zeroshard.comm import Communicator as Communicator
    from zeroshard.zero import STAGES as STAGES
    from zeroshard.zero import FlatLayout as FlatLayout
    from zeroshard.zero import MixedPrecision as MixedPrecision
    from zeroshard.zero import ShardedOptimizer as ShardedOptimizer
    from zeroshard.zero import ShardingStrategy as ShardingStrategy
    from zeroshard.zero import Zero as Zero

keep_earlier_paths()
__getattr__, __dir__, _names = lazy_names(__name__, __file__)
__all__ = ["__version__", *_names]
