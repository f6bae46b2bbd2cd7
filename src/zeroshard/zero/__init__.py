"""The engine: ZeRO stages 0-3 for any module, and any optimizer that can do with a part of the tensors."""

from zeroshard.zero.contract import OptimizerKind, Scope, classify
from zeroshard.zero.engine import Zero
from zeroshard.zero.flat import loaded_later
from zeroshard.zero.layout import FlatLayout, Piece, Slot
from zeroshard.zero.levels import Levels
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.sharded_optimizer import ShardedOptimizer
from zeroshard.zero.state import NamedShard, ShardReader
from zeroshard.zero.strategy import STAGES, Placement, ShardingStrategy, resolve_strategy
from zeroshard.zero.unit import Unit

__all__ = [
    "STAGES",
    "FlatLayout",
    "Levels",
    "MixedPrecision",
    "NamedShard",
    "OptimizerKind",
    "Piece",
    "Placement",
    "Scope",
    "ShardReader",
    "ShardedOptimizer",
    "ShardingStrategy",
    "Slot",
    "Unit",
    "Zero",
    "classify",
    "loaded_later",
    "resolve_strategy",
]
