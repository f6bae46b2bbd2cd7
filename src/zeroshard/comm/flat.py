"""The common base of communicators that work on flat tensors: it checks arguments, and flattens what is given.

A subclass implements `_submit`, which runs an operation at once or later, and `_all_reduce` and the other methods of
the second half, which are given contiguous 1-D tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from zeroshard.comm.base import (
    ReduceOp,
    Work,
    check_op,
    check_parts,
    check_rank,
    check_shards,
    is_own_slice,
    kept_apart,
)
from zeroshard.comm.queued.pieces import flat_input, on_flat, to_flat
from zeroshard.comm.queued.worker import Operation


class FlatCommunicator(ABC):
    """The base class; a subclass sets its ``rank`` and ``world_size``."""

    uniform_order = True
    control_device = torch.device("cpu")
    rank: int
    world_size: int

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` in place; a tensor that is not contiguous costs copies."""
        check_op(op)
        return self._submit(f"all_reduce {op}", on_flat(tensor, lambda flat: self._all_reduce(flat, op)), tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; any strides. ``input`` stays intact, unless ``output`` is its slice."""
        return self._reduce_and_scatter(output, input, op, may_write=is_own_slice(output, input, self.rank))

    def reduce_scatter_consuming(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; the values of ``input`` are undefined afterwards."""
        return self._reduce_and_scatter(output, input, op, may_write=True)

    def _reduce_and_scatter(self, output: Tensor, input: Tensor, op: ReduceOp, *, may_write: bool) -> Work:
        check_op(op)
        check_shards(input, output, self.world_size)
        unsharded = flat_input(kept_apart(input, output, in_place=is_own_slice(output, input, self.rank)))
        is_copy = unsharded.data_ptr() != input.data_ptr()
        must_copy = not may_write and not is_copy and self._writes_input(unsharded)

        def reduce(shard: Tensor) -> None:
            self._reduce_scatter(unsharded.clone() if must_copy else unsharded, op, shard)

        return self._submit(f"reduce_scatter {op}", to_flat(output, reduce), input, output)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather every rank's shard."""
        check_shards(output, input, self.world_size)
        shard = flat_input(kept_apart(input, output, in_place=is_own_slice(input, output, self.rank)))

        def gather(unsharded: Tensor) -> None:
            self._all_gather(unsharded, shard)

        return self._submit("all_gather", to_flat(output, gather), output, input)

    def all_to_all(self, output: Tensor, input: Tensor) -> Work:
        """Receive from every rank its part for this rank."""
        check_parts(output, input, self.world_size)
        parts = flat_input(input)
        return self._submit("all_to_all", to_flat(output, lambda flat: self._all_to_all(flat, parts)), input, output)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Take rank ``src``'s tensor; any strides."""
        check_rank(src, self.world_size)
        return self._submit(f"broadcast {src}", on_flat(tensor, lambda flat: self._broadcast(flat, src)), tensor)

    def barrier(self) -> None:
        """Return when every rank has called it and all operations issued before are done."""
        self._submit("barrier", self._barrier).wait()

    @abstractmethod
    def _submit(self, op: str, operation: Operation, *tensors: Tensor) -> Work:
        """Run ``operation``, at once or after those submitted before; the first of ``tensors`` is the unsharded one."""

    @abstractmethod
    def _all_reduce(self, flat: Tensor, op: ReduceOp) -> None:
        """``flat`` becomes the reduction."""

    @abstractmethod
    def _reduce_scatter(self, unsharded: Tensor, op: ReduceOp, shard: Tensor) -> None:
        """``shard`` becomes this rank's shard of the reduction of ``unsharded``, of which it may be a part.

        It may overwrite ``unsharded`` if `_writes_input` says so.
        """

    def _writes_input(self, unsharded: Tensor) -> bool:
        """Whether `_reduce_scatter` overwrites such an input."""
        return False

    @abstractmethod
    def _all_gather(self, unsharded: Tensor, shard: Tensor) -> None:
        """Gather every rank's shard into ``unsharded``; ``shard`` is this rank's, and may be its slice of that."""

    @abstractmethod
    def _all_to_all(self, output: Tensor, parts: Tensor) -> None:
        """Part r of ``output`` becomes the part of rank r's ``parts`` that is for this rank."""

    @abstractmethod
    def _broadcast(self, flat: Tensor, src: int) -> None:
        """``flat`` becomes rank ``src``'s."""

    @abstractmethod
    def _barrier(self) -> None:
        """Return when every rank has called it."""
