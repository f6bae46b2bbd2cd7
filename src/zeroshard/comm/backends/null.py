"""A world of any size in one process, with no peers and no traffic: for dry runs.

It behaves as if every rank held the same tensors as this one: a sum multiplies by the world size, a gather repeats this
rank's shard. So averages keep their size and no NaN/Inf appear; every buffer is really allocated and written; and one
process can measure the memory of one rank among a thousand.
"""

from __future__ import annotations

from torch import Tensor

from zeroshard.comm.base import DONE, Groups, ReduceOp, Work, check_rank, own_group
from zeroshard.comm.flat import FlatCommunicator
from zeroshard.comm.queued.worker import Operation


class NullCommunicator(FlatCommunicator):
    """Rank ``rank`` of a world of ``world_size`` ranks, of which no other exists.

    Raises:
        ValueError: ``world_size`` is below 1, or ``rank`` is outside it.
    """

    has_peers = False  # no other process answers, so nobody is watched

    def __init__(self, world_size: int, rank: int = 0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        check_rank(rank, world_size)
        self.world_size = world_size
        self.rank = rank

    def split(self, groups: Groups) -> NullCommunicator:
        """Return a `NullCommunicator` with the size of this rank's group."""
        _, ranks = own_group(groups, self.rank)
        return NullCommunicator(len(ranks), ranks.index(self.rank))

    def _submit(self, op: str, operation: Operation, *tensors: Tensor) -> Work:
        operation()
        return DONE

    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        if self.world_size > 1 and op == "sum":
            flat.mul_(self.world_size)
        elif self.world_size > 1 and op == "product":
            flat.pow_(self.world_size)

    def _reduce_scatter(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        own = unsharded.view(self.world_size, -1)[self.rank]
        if shard.data_ptr() != own.data_ptr():
            shard.copy_(own)
        self._all_reduce(shard, op)

    def _all_gather(self, unsharded: Tensor, shard: Tensor) -> None:
        for row in unsharded.view(self.world_size, -1):
            if row.data_ptr() != shard.data_ptr():
                row.copy_(shard)

    def _all_to_all(self, output: Tensor, parts: Tensor) -> None:
        rows = parts.view(self.world_size, -1)
        output.view(self.world_size, -1).copy_(rows[self.rank].expand_as(rows))

    def _broadcast(self, flat: Tensor, src: int) -> None:
        pass  # every rank has it

    def _barrier(self) -> None:
        pass  # every rank is here


class LocalCommunicator(NullCommunicator):
    """The communicator of a single process: every collective is the identity."""

    def __init__(self) -> None:
        super().__init__(1)
