"""A world of one rank: every collective is the identity."""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm.base import (
    DONE,
    ReduceOp,
    Work,
    check_op,
    check_parts,
    check_rank,
    check_shards,
    fill,
    is_own_slice,
    kept_apart,
)


class LocalCommunicator:
    """The communicator of a single process."""

    rank = 0
    world_size = 1
    uniform_order = True
    control_device = torch.device("cpu")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Leave ``tensor`` as it is."""
        check_op(op)
        return DONE

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Copy ``input`` to ``output``, unless they are the same memory."""
        check_op(op)
        check_shards(input, output, 1)
        return self.all_gather(output, input)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Copy ``input`` to ``output``, unless they are the same memory."""
        check_shards(output, input, 1)
        if not is_own_slice(input, output, 0):
            fill(output, kept_apart(input, output, in_place=False))
        return DONE

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Copy ``input`` to ``output``."""
        check_parts(output, input, 1)
        fill(output, input)
        return DONE

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Leave ``tensor`` as it is."""
        check_rank(src, 1)
        return DONE

    def barrier(self) -> None:
        """Return at once."""
