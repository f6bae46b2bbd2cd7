"""Collectives through memory that the CPU ranks of one host map together: no socket, no kernel, one copy.

Each rank owns a segment of a few slots that the others map. It *publishes* what they need in the next slot and
announces it in a counter; they read it where it lies (a reduction adds straight from there) and announce in counters
of theirs that the slot is free again. A slot holds, for a reduce-scatter, a piece of every other rank's shard; for
a gather or broadcast, a piece of its owner's data. Pieces are small enough to stay in the caches:

    publish piece 0 | publish piece 1, reduce piece 0 | publish piece 2, reduce piece 1 | ...

Sums run in the order of ranks, ``((x0 + x1) + x2) + ...``, whoever owns the shard, and `all_reduce` is a reduce-scatter
and an all-gather: the same bits on every rank, from run to run, and from both.
"""

from __future__ import annotations

import socket
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import DONE, ReduceOp, Work, check_op, check_rank, check_shards
from zeroshard.comm.mapped import LOST, Counter, PeerLost, Segment
from zeroshard.comm.p2p import CPU, members, require_cpu
from zeroshard.comm.pieces import COMBINE, Steps, copy, on_flat, shard_interval
from zeroshard.comm.worker import Worker
from zeroshard.errors import UserError

SLOT_BYTES = 1 << 20
NUM_SLOTS = 4
_AHEAD = 1  # pieces published before the first is read: below NUM_SLOTS, or ranks would wait for each other
_PUBLISHED = LOST + 1  # how many slots this rank has filled; the counters after it: how many of each rank's it has read
_READ = _PUBLISHED + 1

_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class SharedMemoryCommunicator:
    """The CPU ranks of one host; tensors of any dtype.

    Operations run in issue order on a thread of their own. To build one is collective over ``group``. It maps
    ``NUM_SLOTS * SLOT_BYTES`` for each rank; the files behind them are gone before the constructor returns.

    Args:
        group: a process group that this rank belongs to; None: the default group.
        timeout_s: after which a peer that does not answer is given up. One that has died is noticed in a second.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
        UserError: the ranks are not all on one host, or it has too little memory to share.
    """

    uniform_order = True
    control_device = CPU

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        parent, self.rank, self.world_size = members(group)
        self._timeout_s = timeout_s
        self._segments: list[Segment] = []
        self._worker: Worker | None = None
        if self.world_size > 1:
            self._segments = _map_segments(parent, self.rank, self.world_size)
            self._peers = [rank for rank in range(self.world_size) if rank != self.rank]
            self._own = self._segments[self.rank].counters
            self._num_read = [0] * self.world_size
            self._num_published = 0
            self._slots: dict[torch.dtype, list[list[Tensor]]] = {}
            self._worker = Worker(f"shm-{self.rank}")

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce ``tensor`` in place; any strides, at the cost of copies where its elements do not lie in order."""
        check_op(op)
        return self._submit(on_flat(tensor, lambda flat: self._all_reduce(flat, op)), tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Reduce and keep this rank's slice; the rest of ``input`` stays as it is."""
        check_op(op)
        check_shards(input, output, self.world_size)
        return self._submit(self._reduce(input.detach().view(-1), op, output.detach().view(-1)), input, output)

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Gather every rank's shard."""
        check_shards(output, input, self.world_size)
        return self._submit(self._gather(output.detach().view(-1), input.detach().view(-1)), input, output)

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Take rank ``src``'s tensor; any strides."""
        check_rank(src, self.world_size)
        return self._submit(on_flat(tensor, lambda flat: self._broadcast(flat, src)), tensor)

    def barrier(self) -> None:
        """Return when every rank has called it and all that was issued before is done."""
        self._run(self._barrier()).wait()

    def close(self) -> None:
        """Finish what was issued, end the thread and let the memory go; harmless twice."""
        if self._worker is not None:
            self._worker.close()
        for segment in self._segments:
            segment.close()

    def _submit(self, steps: Steps, *tensors: Tensor) -> Work:
        require_cpu("SharedMemoryCommunicator", *tensors)
        return self._run(steps) if tensors[0].numel() else DONE

    def _run(self, steps: Steps) -> Work:
        if self._worker is not None:
            return self._worker.submit(self._telling(steps))
        for work in steps:
            work.wait()
        return DONE

    def _telling(self, steps: Steps) -> Steps:
        """``steps``; if a peer is lost in them, the others learn from us which."""
        try:
            yield from steps
        except PeerLost as error:
            self._own[LOST].advance(error.rank + 1)
            raise

    # -- slots --------------------------------------------------------------------------------------------------

    def _free_slot(self, dtype: torch.dtype) -> Steps:
        """Wait until all have read what lies in the slot that is filled next."""
        for rank in self._peers:
            yield _Until(
                self._segments[rank].counters[_READ + self.rank], self._num_published + 1 - NUM_SLOTS, self._timeout_s
            )

    def _published(self, sources: Sequence[int]) -> Steps:
        """Wait until each of ``sources`` has published what is read next."""
        for rank in sources:
            if rank != self.rank:
                yield _Until(self._segments[rank].counters[_PUBLISHED], self._num_read[rank] + 1, self._timeout_s)
