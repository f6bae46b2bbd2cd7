"""What communicators around another one have in common: they say of themselves what it says, and pass operations on.

    ObservedCommunicator(SentinelCommunicator(ThrottledCommunicator(SharedMemoryCommunicator())))

Callers see no difference, so behaviour is stacked in any order. A wrapper overrides `Wrapper._around`, through which
every operation goes.
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
    add_done_callback,
    all_to_all,
    empty_for,
    reduce_scatter_consuming,
    split,
)


class WrappedWork:
    """``work``, as it is."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for the inner one."""
        self._work.wait()

    def add_done_callback(self, ended: Callable[[float], None]) -> None:
        """Have the inner one call ``ended``, if it ever does."""
        add_done_callback(self._work, ended)


class Wrapper:
    """``inner``, as it is."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner

    def _around(self, op: str, whole: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Issue an operation, and what this wrapper is for.

        Args:
            op: name of the method.
            whole: the whole tensor: what a reduce-scatter or all-to-all is given, what an all-gather fills; None: a
                barrier has none.
            issue: has the inner communicator do it.
            detail: what else ranks must agree on: the reduction, or where a broadcast comes from.
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
        """Pass on."""
        return self._around("all_reduce", tensor, lambda: self.inner.all_reduce(tensor, op), op)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on."""
        return self._around("reduce_scatter", input, lambda: self.inner.reduce_scatter(output, input, op), op)

    def reduce_scatter_consuming(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Pass on; for whoever wraps, an ordinary reduce-scatter."""
        return self._around("reduce_scatter", input, lambda: reduce_scatter_consuming(self.inner, output, input, op), op)

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
        """A part of the inner communicator, in a copy of this wrapper that shares what it has."""
        part = copy.copy(self)
        part.inner = split(self.inner, groups)
        return part
