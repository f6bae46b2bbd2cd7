"""Groups of ranks: those that shard training state among themselves, and those that hold the same shard.

Without replicas all ranks are one shard group. Else ``shard_size`` neighbouring ranks are, and each is a replica::

                 shard 0   shard 1
    replica 0    rank 0    rank 1        a row is a shard group: weights are gathered along it;
    replica 1    rank 2    rank 3        a column is a replicate group: the shards of gradients are summed along it

Ranks of one node communicate faster than ranks of two nodes. So ``shard_size`` neighbouring ranks, a node's, may shard
training state among themselves. Along a row ranks send what a world of ``shard_size`` ranks would
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
class RankGroups:
    """Communicators over the groups of ranks that one rank belongs to."""

    world: Communicator  # all ranks
    shard_group: Communicator  # the ranks with the other shards; this rank owns the shard with its rank's number there
    replicate_group: Communicator  # the ranks that own the same shard
    node_group: Communicator | None = None  # those among which a second copy of weights is sharded; None: there is none
    nodes: Nodes | None = None  # if gradients are reduced in two steps, first inside a node; None: in one step
    # number of parts into which shards are cut, over all ranks; None: one per rank. See `zero/transport/exact_sums.py`
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

        ``secondary_shard_size``: as in `ShardingStrategy`; ``node_size`` and
        ``reproducible``: as in `MixedPrecision` and `Zero`.

        Raises:
            ValueError: the world cannot be divided so, or ``comm`` cannot be split.
        """
        world_size = comm.world_size
        if shard_size is not None:
            rules.check_shard_size(shard_size, world_size)
        if reproducible is not None:  # ranks share micro-batches evenly, and exchange their gradients
            rules.check_reproducible(reproducible, world_size)
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
    def parts(self) -> int:
        """Number of parts of each shard; the optimizer's pieces and partial norms end at the borders of parts."""
        return 1 if self.reproducible is None else self.reproducible // self.world.world_size

    @property
    def writes(self) -> bool:
        """Whether this rank is in the first replica, which writes and draws the state that all replicas share."""
        return self.replicate_group.rank == 0
