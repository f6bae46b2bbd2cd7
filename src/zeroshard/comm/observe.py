"""Measuring communication from outside: a wrapper that records every operation of the communicator in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.comm.base import Communicator, ReduceOp, Work, empty_for
from zeroshard.comm.exposed import Exposed
from zeroshard.comm.labels import CONTROL, current_scope


@dataclass
class CommRecord:
    """One operation.

    Attributes:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``broadcast`` or ``barrier``.
        num_bytes: of the whole tensor (the input of a reduce-scatter, the output of an all-gather). What a rank
            must send follows from it: ``(W-1)/W`` of it for a reduce-scatter or all-gather, twice that for an
            all-reduce.
        scope: the caller's label, see `scope`.
        issue_s: seconds spent in the call.
        wait_s: seconds that the host spent in `Work.wait`. On CUDA neither blocks the host; `exposed` tells what the
            device paid.
    """

    op: str
    num_bytes: int
    scope: str
    issue_s: float = 0.0
    wait_s: float = 0.0


class _ObservedWork:
    def __init__(self, work: Work, record: CommRecord, exposed: Exposed, device: torch.device) -> None:
        self._work, self._record, self._exposed, self._device = work, record, exposed, device

    def wait(self) -> None:
        start = time.perf_counter()
        with self._exposed.timed(self._record.scope, self._device):
            self._work.wait()
        self._record.wait_s += time.perf_counter() - start


class ObservedCommunicator:
    """``inner``, with a record of every operation in ``records`` (in the order of issue).

    Records accumulate until `drain` takes them; what nothing hid accumulates in ``exposed``, until its own `take`.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.records: list[CommRecord] = []
        self.exposed = Exposed()

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

    def _observed(self, op: str, tensor: Tensor, issue: Callable[[], Work]) -> Work:
        """What ``issue`` returns, recorded; ``tensor``: the whole one of the operation."""
        start, label = time.perf_counter(), current_scope()
        with self.exposed.timed(label, tensor.device, issuing=True):
            work = issue()
        record = CommRecord(op, tensor.numel() * tensor.element_size(), label, time.perf_counter() - start)
        self.records.append(record)
        return _ObservedWork(work, record, self.exposed, tensor.device)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Record and pass on."""
        return self._observed("all_reduce", tensor, lambda: self.inner.all_reduce(tensor, op))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Record and pass on."""
        return self._observed("reduce_scatter", input, lambda: self.inner.reduce_scatter(output, input, op))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Record and pass on."""
        return self._observed("all_gather", output, lambda: self.inner.all_gather(output, input))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Record and pass on."""
        return self._observed("broadcast", tensor, lambda: self.inner.broadcast(tensor, src))

    def barrier(self) -> None:
        """Record and pass on."""
        start, label = time.perf_counter(), current_scope()
        with self.exposed.timed(label, self.control_device, issuing=True):
            self.inner.barrier()
        self.records.append(CommRecord("barrier", 0, label, time.perf_counter() - start))

    def drain(self) -> list[CommRecord]:
        """Take the records so far."""
        records, self.records = self.records, []
        return records

    def totals(self, *, control: bool = False) -> dict[str, int]:
        """Bytes by operation over the records held; control messages only where asked for."""
        total: Counter[str] = Counter()
        for record in self.records:
            if (record.scope == CONTROL) == control:
                total[record.op] += record.num_bytes
        return dict(total)
