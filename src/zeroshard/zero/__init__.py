"""The engine: ZeRO stages 0-3 for any module, and any optimizer that works on a part of the elements or tensors.

Names are loaded on first use, so that the command line can ask `zeroshard.zero.rules` without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
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

_HOME = {
    "loaded_later": "buffers.initial",
    "FlatLayout": "buffers.layout",
    "Piece": "buffers.layout",
    "Slot": "buffers.layout",
    "DrawsParts": "buffers.partition",
    "Unit": "buffers.unit",
    "Zero": "engine",
    "Levels": "levels",
    "OptimizerKind": "optimizers.requirements",
    "Scope": "optimizers.requirements",
    "classify": "optimizers.requirements",
    "MixedPrecision": "precision",
    "LocalSteps": "replicas.local_steps",
    "Meeting": "replicas.replicas",
    "ReplicaDivergedError": "replicas.replicas",
    "Replicas": "replicas.replicas",
    "ShardedOptimizer": "sharded_optimizer.optimizer",
    "NamedShard": "state.named_shards",
    "ShardReader": "state.named_shards",
    "STAGES": "strategy",
    "Placement": "strategy",
    "ShardingStrategy": "strategy",
    "resolve_strategy": "strategy",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
