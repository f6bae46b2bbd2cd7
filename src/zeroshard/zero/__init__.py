"""The engine: ZeRO stages 0-3 for any module, and any optimizer that works on a part of the elements or tensors.

Names are loaded on first use, so that the command line can ask `zeroshard.settings.rules` without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.optim.classes.requirements import OptimizerKind as OptimizerKind
    from zeroshard.optim.classes.requirements import Reach as Reach
    from zeroshard.optim.classes.requirements import classify as classify
    from zeroshard.optim.named_shards import NamedShard as NamedShard
    from zeroshard.optim.named_shards import ShardReader as ShardReader
    from zeroshard.zero.core.layout import FlatLayout as FlatLayout
    from zeroshard.zero.core.layout import Piece as Piece
    from zeroshard.zero.core.layout import Slot as Slot
    from zeroshard.zero.core.ranks import RankGroups as RankGroups
    from zeroshard.zero.core.strategy import STAGES as STAGES
    from zeroshard.zero.core.strategy import Placement as Placement
    from zeroshard.zero.core.strategy import ShardingStrategy as ShardingStrategy
    from zeroshard.zero.core.strategy import resolve_strategy as resolve_strategy
    from zeroshard.zero.core.units import Unit as Unit
    from zeroshard.zero.engine import Zero as Zero
    from zeroshard.zero.frozen_formats.settings import FrozenFormat as FrozenFormat
    from zeroshard.zero.local_steps.outer_steps import OuterStep as OuterStep
    from zeroshard.zero.local_steps.outer_steps import OuterSteps as OuterSteps
    from zeroshard.zero.local_steps.outer_steps import ReplicaDivergedError as ReplicaDivergedError
    from zeroshard.zero.local_steps.settings import LocalSteps as LocalSteps
    from zeroshard.zero.meta_models import DrawsParts as DrawsParts
    from zeroshard.zero.meta_models import loaded_later as loaded_later
    from zeroshard.zero.offload.settings import Offload as Offload
    from zeroshard.zero.precision import MixedPrecision as MixedPrecision
    from zeroshard.zero.sharded_optimizer.optimizer import ShardedOptimizer as ShardedOptimizer

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
