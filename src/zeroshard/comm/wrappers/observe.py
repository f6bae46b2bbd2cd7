"""Measures communication from outside: a wrapper that records every operation of the communicator that it wraps."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from zeroshard.comm.base import Communicator, Work
from zeroshard.comm.labels import CONTROL, current_label
from zeroshard.comm.wrappers.exposed import Exposed
from zeroshard.comm.wrappers.wrapper import WrappedWork, Wrapper


@dataclass
class CommRecord:
    """The record of one operation."""

    op: str  # ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast`` or ``barrier``
    # bytes of the unsharded tensor (the input of a reduce-scatter or all-to-all, the output of an all-gather). A rank
    # must send ``(W-1)/W`` of them, for an all-reduce twice that.
    num_bytes: int
    label: str  # the caller's; see `zeroshard.comm.labelled`
    world_size: int  # W, how many ranks took part
    issue_s: float = 0.0  # seconds that the host spent in the call that issued it
    # seconds that the host spent in `Work.wait`. On CUDA neither blocks the host; for how long the device's computation
    # waited is in `ObservedCommunicator.exposed`.
    wait_s: float = 0.0


def _span(what: str, label: str) -> AbstractContextManager[Any]:
    """Return a span in torch's profiler if one is running, else a context that does nothing."""
    return record_function(f"{what} {label}") if torch.autograd._profiler_enabled() else nullcontext()


class _ObservedWork(WrappedWork):
    def __init__(self, work: Work, record: CommRecord, exposed: Exposed, device: torch.device) -> None:
        super().__init__(work)
        self._record, self._exposed, self._device = record, exposed, device

    def wait(self) -> None:
        start = time.perf_counter()
        with self._exposed.timed(self._record.label, self._device), _span("wait", self._record.label):
            self._work.wait()
        self._record.wait_s += time.perf_counter() - start


class ObservedCommunicator(Wrapper):
    """``inner``, with a record of every operation in ``records``, in the order of issue. Its parts share the list.

    Records accumulate until `drain` takes them. Exposed communication time accumulates in ``exposed`` until
    `Exposed.take_seconds` takes it.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner)
        self.records: list[CommRecord] = []
        self.exposed = Exposed()

    def _around(self, op: str, unsharded: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Issue an operation and record it."""
        assert unsharded is not None, "a barrier is recorded by itself"
        start, label = time.perf_counter(), current_label()
        with self.exposed.timed(label, unsharded.device, issuing=True), _span(op, label):
            work = issue()
        num_bytes = unsharded.nbytes
        record = CommRecord(op, num_bytes, label, self.world_size, time.perf_counter() - start)
        self.records.append(record)
        return _ObservedWork(work, record, self.exposed, unsharded.device)

    def barrier(self) -> None:
        """Wait at the inner communicator's barrier, and record it."""
        start, label = time.perf_counter(), current_label()
        with self.exposed.timed(label, self.control_device, issuing=True):
            self.inner.barrier()
        self.records.append(CommRecord("barrier", 0, label, self.world_size, time.perf_counter() - start))

    def drain(self) -> list[CommRecord]:
        """Return the records so far, and forget them."""
        records = list(self.records)
        self.records.clear()  # not a new list: parts append to the same one
        return records

    def totals(self, *, control: bool = False) -> dict[str, int]:
        """Return the recorded bytes by operation: without control messages, or with ``control`` of those alone."""
        total: Counter[str] = Counter()
        for record in self.records:
            if (record.label == CONTROL) == control:
                total[record.op] += record.num_bytes
        return dict(total)
