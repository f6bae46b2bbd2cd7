"""Groups of ranks (`zeroshard.zero.core.ranks`): settings that have no effect or do not go with others; replicas."""

from __future__ import annotations

from typing import Any

from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.settings import rules
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.precision import MixedPrecision


def check_change(
    strategy: ShardingStrategy, precision: MixedPrecision, rank_groups: RankGroups, *, local_steps: bool
) -> None:
    """Raise ValueError if an engine cannot change to the row: for its ranks, wire format, or another second copy."""
    check_wire(strategy, precision)
    if rank_groups.shard_group is not rank_groups.world and not local_steps:
        rules.check_something_is_sharded(_stage(strategy))
    size = strategy.secondary_shard_size
    if size is not None and (rank_groups.node_group is None or rank_groups.node_group.world_size != size):
        raise ValueError(f"secondary_shard_size: {size} is not what the engine was made with; give it to Zero()")


def check_wire(strategy: ShardingStrategy, precision: MixedPrecision) -> None:
    """Raise ValueError if the row of the stage table does not support the wire format."""
    if precision.has_wire:
        name = "gather" if precision.gather is not None else "reduce"
        rules.check_wire(name, getattr(precision, name), _stage(strategy))


def ranks_of(
    comm: Communicator,
    strategy: ShardingStrategy,
    shard_size: int | None,
    precision: MixedPrecision,
    *,
    local_steps: bool,
    reproducible: int | None,
    accumulate: str | None,
) -> tuple[RankGroups, RankGroups]:
    """Return the groups of all ranks, and the engine's: with local steps those of one replica, as if it were the world.

    Collective. Raises ValueError for a ``shard_size`` without effect, local steps of one replica, what ``reproducible``
    bars, and a wire format that the row of the stage table does not support.
    """
    check_wire(strategy, precision)
    if reproducible is not None:
        wire = "precision.gather" if precision.gather else "precision.reduce" if precision.reduce else ""
        others: dict[str, Any] = {"local_steps": local_steps, "shard_size": shard_size, "accumulate": accumulate}
        rules.check_same_bits(reproducible, wire=wire, **others)
    if local_steps:
        rules.check_local_steps("local_steps", "it", shard_size)
    elif shard_size is not None:
        rules.check_something_is_sharded(_stage(strategy))
    ranks = RankGroups.of(comm, shard_size, strategy.secondary_shard_size, precision.node_size, reproducible)
    replica = RankGroups(ranks.shard_group, ranks.shard_group, LocalCommunicator(), ranks.node_group)
    return ranks, replica if local_steps else ranks


def _stage(strategy: ShardingStrategy) -> int:
    """0 if the row shards nothing; else a number above it."""
    return int(strategy.optim is SHARD)
