"""A world of any size in one process, with no peers and no traffic: for measurements.

It behaves as if every rank held the same tensors as this one: a sum multiplies by the world size, a gather repeats this
rank's shard. So averages keep their size and no NaN/Inf appear; every buffer is really allocated and written; and one
process can measure the memory of one rank among a thousand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm.base import (
    DONE,
    Groups,
    ReduceOp,
    Work,
    check_op,
    check_parts,
    check_rank,
    check_shards,
    fill,
    is_own_slice,
    kept_apart,
    own_group,
)


class NullCommunicator:
    """Rank ``rank`` of a world of ``world_size`` ranks, of which no other exists.

    Raises:
        ValueError: ``world_size`` is below 1, or ``rank`` is outside it.
    """

    uniform_order = True
    control_device = torch.device("cpu")

    def __init__(self, world_size: int, rank: int = 0) -> None:
        if world_size < 1:
            raise ValueError(f"world_size: {world_size} ranks; give at least 1")
        check_rank(rank, world_size)
        self.world_size = world_size
        self.rank = rank

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``world_size`` copies of ``tensor``."""
        check_op(op)
        if self.world_size == 1:
            return DONE
        if op == "sum":
            tensor.mul_(self.world_size)
        elif op == "product":
            tensor.pow_(self.world_size)
        return DONE

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``world_size`` copies of this rank's slice of ``input``."""
        check_shards(input, output, self.world_size)
        input = kept_apart(input, output, in_place=is_own_slice(output, input, self.rank))
        own = input.reshape(self.world_size, -1)[self.rank]
        if output.data_ptr() != own.data_ptr():
            fill(output, own)
        return self.all_reduce(output, op)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Repeat ``input`` once for each rank."""
        check_shards(output, input, self.world_size)
        shard = kept_apart(input, output, in_place=is_own_slice(input, output, self.rank)).reshape(-1)
        if not output.is_contiguous():
            fill(output, shard.repeat(self.world_size))
            return DONE
        for row in output.view(self.world_size, -1):
            if row.data_ptr() != shard.data_ptr():
                row.copy_(shard)
        return DONE

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Take the part for this rank from each of ``world_size`` copies of ``input``."""
        check_parts(output, input, self.world_size)
        own = input.reshape(self.world_size, -1)[self.rank]
        fill(output, own.expand(self.world_size, -1))
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Leave ``tensor`` as it is."""
        check_rank(src, self.world_size)
        return DONE

    def barrier(self) -> None:
        """Return at once."""

    def split(self, groups: Groups) -> NullCommunicator:
        """Return a `NullCommunicator` with the size of this rank's group."""
        _, ranks = own_group(groups, self.rank)
        return NullCommunicator(len(ranks), ranks.index(self.rank))
