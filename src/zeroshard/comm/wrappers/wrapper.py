"""The base of communicators that wrap another one and add behaviour around its operations.

    ObservedCommunicator(SentinelCommunicator(ThrottledCommunicator(SharedMemoryCommunicator())))

A wrapper has the rank, world size and other facts of the communicator inside, so callers see no difference and wrappers
stack in any order. A subclass overrides `Wrapper._around`, through which every operation goes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor

from zeroshard.comm.base import (
    DONE,
    Communicator,
    Groups,
    ReduceOp,
    Work,
    all_to_all,
    empty_for,
    reduce_scatter_consuming,
    split,
)


class WrappedWork:
    """A handle that passes everything on to ``work``."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for the inner handle."""
        self._work.wait()


class Wrapper:
    """A communicator that passes every operation on to ``inner``."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner

    def _around(self, op: str, unsharded: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Issue an operation; subclasses add their behaviour here.

        Args:
            op: name of the collective.
            unsharded: the input of a reduce-scatter or all-to-all, the output of an all-gather, the tensor of an
                all-reduce or a broadcast; None for a barrier.
            issue: issues the operation on the inner communicator.
            detail: what else the ranks must agree on: the reduction, or the source of a broadcast.
        """
        return issue()

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
        """The inner communicator's `uniform_order`."""
        return self.inner.uniform_order

    @property
    def control_device(self) -> torch.device:
        """The inner communicator's `control_device`."""
        return self.inner.control_device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor ``[numel]`` in memory that the inner communicator accesses fastest."""
        return empty_for(self.inner, numel, dtype, torch.device("cpu"))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on."""
        return self._around("all_reduce", tensor, lambda: self.inner.all_reduce(tensor, op), op)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on."""
        return self._around("reduce_scatter", input, lambda: self.inner.reduce_scatter(output, input, op), op)

    def reduce_scatter_consuming(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on; to `_around` it is a reduce-scatter like any other."""

        def issue() -> Work:
            return reduce_scatter_consuming(self.inner, output, input, op)

        return self._around("reduce_scatter", input, issue, op)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Pass on."""
        return self._around("all_gather", output, lambda: self.inner.all_gather(output, input))

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Pass on."""
        return self._around("all_to_all", input, lambda: all_to_all(self.inner, output, input))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Pass on."""
        return self._around("broadcast", tensor, lambda: self.inner.broadcast(tensor, src), f"from {src}")

    def barrier(self) -> None:
        """Return when every rank has called it, and this wrapper agrees."""

        def meet() -> Work:
            self.inner.barrier()
            return DONE

        self._around("barrier", None, meet).wait()

    def split(self, groups: Groups) -> Self:
        """Split the inner communicator, and wrap the part in a shallow copy of this wrapper."""
        part = copy.copy(self)
        part.inner = split(self.inner, groups, anew=True)
        return part
