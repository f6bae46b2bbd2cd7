"""Communication without overlap: each operation ends before its call returns, so that computation stands still for it.

What overlap is worth is the difference between a run and the same run over `BlockingCommunicator`: the same
operations, in the same order, with the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm.base import DONE, Communicator, Groups, ReduceOp, Work, empty_for, split


class BlockingCommunicator:
    """``inner``, whose operations have ended when they return.

    On CUDA the current stream is ordered after them, which is what `Work.wait` does there; the host goes on.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        """The inner communicator's rank."""
        return self.inner.rank

    @property
    def world_size(self) -> int:
        """The inner communicator's world size."""
        return self.inner.world_size

    @property
    def uniform_order(self) -> bool:
        """As the inner communicator says."""
        return self.inner.uniform_order

    @property
    def control_device(self) -> torch.device:
        """As the inner communicator says."""
        return self.inner.control_device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """What the inner communicator reaches best."""
        return empty_for(self.inner, numel, dtype, torch.device("cpu"))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on and wait."""
        return _ended(self.inner.all_reduce(tensor, op))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on and wait."""
        return _ended(self.inner.reduce_scatter(output, input, op))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Pass on and wait."""
        return _ended(self.inner.all_gather(output, input))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Pass on and wait."""
        return _ended(self.inner.broadcast(tensor, src))

    def barrier(self) -> None:
        """Pass on."""
        self.inner.barrier()

    def split(self, groups: Groups) -> BlockingCommunicator:
        """A part of the inner communicator that blocks likewise."""
        return BlockingCommunicator(split(self.inner, groups))


def _ended(work: Work) -> Work:
    work.wait()
    return DONE
