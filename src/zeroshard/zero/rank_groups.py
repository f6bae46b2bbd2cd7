"""A world divided into groups of ranks: those of ZeRO (`zeroshard.zero.core.ranks`), and those of a node.

Ranks of one node communicate faster than ranks of two nodes. So ``shard_size`` neighbouring ranks, a node's, may shard
training state among themselves. Along a row of the table there, ranks send what a world of ``shard_size`` ranks would
send. Along a column they all-reduce one shard of the gradients, once per reduction: only ``1 / shard_size`` of the
model crosses between nodes.

If replicas take local steps (`zeroshard.zero.local_steps`), ranks communicate along a column only at outer steps.

Zhang et al. 2022, "MiCS: Near-linear Scaling for Training Gigantic Model on Public Cloud",
https://arxiv.org/abs/2205.00119, section 3; FSDP calls it hybrid sharding.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.comm import Communicator, LocalCommunicator, split
from zeroshard.settings import rules
from zeroshard.zero.core import ranks
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.precision import MixedPrecision


@dataclass(frozen=True)
class Nodes:
    """Nodes of equally many ranks, as one rank sees them, for gradients that are summed inside a node first.

    Attributes:
        within: the ranks of this rank's node.
        between: the ranks that have this rank's place in each node, in the order of nodes.
    """

    within: Communicator
    between: Communicator


@dataclass(frozen=True)
class RankGroups(ranks.RankGroups):
    """Communicators over the groups of ranks that one rank belongs to.

    Attributes:
        world, shard_group, replicate_group: as of the core's.
        node_group: the ranks among which a second copy of weights is sharded; None without a second copy.
        nodes: the nodes, if gradients are reduced in two steps, first inside a node; None: in one step.
        reproducible: number of parts into which shards are cut, over all ranks; None: one per rank. See
            `zeroshard.zero.transport.exact_sums`.
    """

    node_group: Communicator | None = None
    nodes: Nodes | None = None
    reproducible: int | None = None

    @classmethod
    def of(
        cls,
        comm: Communicator,
        shard_size: int | None = None,
        secondary_shard_size: int | None = None,
        node_size: int | None = None,
        reproducible: int | None = None,
    ) -> RankGroups:
        """Return the groups of a world whose state is sharded over ``shard_size`` ranks, None: over all. Collective.

        ``secondary_shard_size``: as in `ShardingStrategy`; ``node_size``: as in `MixedPrecision`; ``reproducible``:
        as in `Zero`.

        Raises:
            ValueError: the world cannot be divided so, or ``comm`` cannot be split.
        """
        world_size = comm.world_size
        if shard_size is not None:
            rules.check_shard_size(shard_size, world_size)
        if reproducible is not None:  # ranks share micro-batches evenly, and exchange their gradients
            rules.check_reproducible("reproducible", reproducible, world_size)
            if world_size > 1 and not hasattr(comm, "all_to_all"):
                what = f"reproducible sums exchange gradients, and a {type(comm).__name__} has no all_to_all"
                raise ValueError(f"comm: {what}; give it one")
        node_group, nodes = None, None
        if secondary_shard_size is not None:
            rules.check_groups("secondary_shard_size", secondary_shard_size, shard_size or world_size)
            node_group = split(comm, rules.rows(world_size, secondary_shard_size))
        if node_size is not None:
            rules.check_node_sums("node_size", node_size, shard_size if shard_size != world_size else None)
            rules.check_groups("node_size", node_size, world_size)
            within = node_group if node_size == secondary_shard_size else None
            within = within or split(comm, rules.rows(world_size, node_size))
            nodes = Nodes(within, split(comm, rules.columns(world_size, node_size)))
        if shard_size is None or shard_size == world_size:
            return cls(comm, comm, LocalCommunicator(), node_group, nodes, reproducible)
        if shard_size == 1:
            return cls(comm, LocalCommunicator(), comm, node_group)
        shard_group = split(comm, rules.rows(world_size, shard_size))
        return cls(comm, shard_group, split(comm, rules.columns(world_size, shard_size)), node_group)

    @property
    def within_replica(self) -> RankGroups:
        """The groups of one replica, as if it were the world: for an engine whose replicas take local steps."""
        alone = LocalCommunicator()
        return RankGroups(self.shard_group, self.shard_group, replicate_group=alone, node_group=self.node_group)

    @property
    def parts(self) -> int:
        """Number of parts of each shard; the optimizer's pieces and partial norms end at the borders of parts."""
        return 1 if self.reproducible is None else self.reproducible // self.world.world_size


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


def check_rank_groups(
    strategy: ShardingStrategy,
    shard_size: int | None,
    precision: MixedPrecision,
    *,
    local_steps: bool,
    reproducible: int | None = None,
    accumulate: str | None = None,
) -> None:
    """Raise ValueError for a ``shard_size`` without effect, local steps of one replica, what ``reproducible`` bars."""
    if reproducible is not None:
        wire = "precision.gather" if precision.gather else "precision.reduce" if precision.reduce else ""
        others = {"local_steps": local_steps, "shard_size": shard_size, "accumulate": accumulate}
        rules.check_same_bits("reproducible", reproducible, wire=wire, **others)
    if local_steps:
        rules.check_local_steps("local_steps", "it", shard_size)
    elif shard_size is not None:
        rules.check_something_is_sharded(_stage(strategy))


def _stage(strategy: ShardingStrategy) -> int:
    """0 if the row shards nothing; else a number above it."""
    return int(strategy.optim is SHARD)
