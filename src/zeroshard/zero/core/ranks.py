"""Groups of ranks: those that shard training state among themselves, and those that hold the same shard.

Without replicas all ranks are one shard group. Else ``shard_size`` neighbouring ranks are, and each is a replica::

                 shard 0   shard 1
    replica 0    rank 0    rank 1        a row is a shard group: weights are gathered along it;
    replica 1    rank 2    rank 3        a column is a replicate group: the shards of gradients are summed along it
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.comm import Communicator


@dataclass(frozen=True)
class RankGroups:
    """Communicators over the groups of ranks that one rank belongs to."""

    world: Communicator  # all ranks
    shard_group: Communicator  # the ranks with the other shards; this rank owns the shard with its rank's number there
    replicate_group: Communicator  # the ranks that own the same shard

    @property
    def writes(self) -> bool:
        """Whether this rank is in the first replica, which writes and draws the state that all replicas share."""
        return self.replicate_group.rank == 0
