"""Measuring communication from outside: a wrapper that records every operation of the communicator in it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.comm.base import Communicator, ReduceOp, Work, empty_for
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
        wait_s: seconds spent in `Work.wait`: communication that nothing hid. On CUDA neither blocks the host, so
            both say what the host paid.
    """

    op: str
    num_bytes: int
    scope: str
    issue_s: float = 0.0
    wait_s: float = 0.0


class _ObservedWork:
    def __init__(self, work: Work, record: CommRecord) -> None:
        self._work, self._record = work, record

    def wait(self) -> None:
        start = time.perf_counter()
        self._work.wait()
        self._record.wait_s += time.perf_counter() - start


class ObservedCommunicator:
    """``inner``, with a record of every operation in ``records`` (in the order of issue).

    Records accumulate until `drain` takes them.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.records: list[CommRecord] = []

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

    def _record(self, op: str, tensor: Tensor | None, start: float) -> CommRecord:
        num_bytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        record = CommRecord(op, num_bytes, current_scope(), issue_s=time.perf_counter() - start)
        self.records.append(record)
        return record

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Record and pass on."""
        start = time.perf_counter()
        work = self.inner.all_reduce(tensor, op)
        return _ObservedWork(work, self._record("all_reduce", tensor, start))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> Work:
        """Record and pass on."""
        start = time.perf_counter()
        work = self.inner.reduce_scatter(output, input, op)
        return _ObservedWork(work, self._record("reduce_scatter", input, start))

    def all_gather(self, output: Tensor, input: Tensor) -> Work:
        """Record and pass on."""
        start = time.perf_counter()
        work = self.inner.all_gather(output, input)
        return _ObservedWork(work, self._record("all_gather", output, start))

    def broadcast(self, tensor: Tensor, src: int) -> Work:
        """Record and pass on."""
        start = time.perf_counter()
        work = self.inner.broadcast(tensor, src)
        return _ObservedWork(work, self._record("broadcast", tensor, start))

    def barrier(self) -> None:
        """Record and pass on."""
        start = time.perf_counter()
        self.inner.barrier()
        self._record("barrier", None, start)

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
