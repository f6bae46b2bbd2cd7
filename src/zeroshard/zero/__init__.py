"""The engine: ZeRO stages 0-3 for any module, and any optimizer that works on a part of the elements or tensors."""

from zeroshard.zero.buffers.initial import loaded_later
from zeroshard.zero.buffers.layout import FlatLayout, Piece, Slot
from zeroshard.zero.buffers.partition import DrawsParts
from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.engine import Zero
from zeroshard.zero.levels import Levels
from zeroshard.zero.optimizers.requirements import OptimizerKind, Scope, classify
from zeroshard.zero.precision import MixedPrecision
from zeroshard.zero.replicas.local_steps import LocalSteps
from zeroshard.zero.replicas.replicas import Meeting, ReplicaDivergedError, Replicas
from zeroshard.zero.sharded_optimizer.optimizer import ShardedOptimizer
from zeroshard.zero.state.named_shards import NamedShard, ShardReader
from zeroshard.zero.strategy import STAGES, Placement, ShardingStrategy, resolve_strategy

__all__ = [
    "STAGES",
    "DrawsParts",
    "FlatLayout",
    "Levels",
    "LocalSteps",
    "Meeting",
    "MixedPrecision",
    "NamedShard",
    "OptimizerKind",
    "Piece",
    "Placement",
    "ReplicaDivergedError",
    "Replicas",
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
