"""Measuring communication from outside: a wrapper that records every operation of the communicator in it."""

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

from zeroshard.comm.base import Communicator, Work, add_done_callback
from zeroshard.comm.labels import CONTROL, current_scope
from zeroshard.comm.wrappers.exposed import Exposed, with_phase
from zeroshard.comm.wrappers.wrapper import WrappedWork, Wrapper


@dataclass
class CommRecord:
    """One operation.

    Attributes:
        op: ``all_reduce``, ``reduce_scatter``, ``all_gather``, ``all_to_all``, ``broadcast`` or ``barrier``.
        num_bytes: of the whole tensor (the input of a reduce-scatter or all-to-all, the output of an all-gather).
            What a rank must send follows from it: ``(W-1)/W`` of it, for an all-reduce twice that.
        scope: the caller's label, see `scope`.
        world_size: W, how many ranks took part.
        issue_s: seconds spent in the call.
        wait_s: seconds that the host spent in `Work.wait`. On CUDA neither blocks the host; `exposed` tells what the
            device paid.
        label: the scope, with the phase in which it was issued, as `Exposed` has it; only where `timed`.
        issued_at_s: when the call began, by `time.perf_counter`.
        ended_at_s: when the operation had ended; None where not `timed`, until then, and on CUDA.
    """

    op: str
    num_bytes: int
    scope: str
    world_size: int
    issue_s: float = 0.0
    wait_s: float = 0.0
    label: str = ""
    issued_at_s: float = 0.0
    ended_at_s: float | None = None

    def end(self, at_s: float) -> None:
        """Note when the operation ended, by `time.perf_counter`."""
        self.ended_at_s = at_s


def _span(what: str, label: str) -> AbstractContextManager[Any]:
    """A span in torch's profiler, where one is running."""
    return record_function(f"{what} {label}") if torch.autograd._profiler_enabled() else nullcontext()


class _ObservedWork(WrappedWork):
    def __init__(self, work: Work, record: CommRecord, exposed: Exposed, device: torch.device) -> None:
        super().__init__(work)
        self._record, self._exposed, self._device = record, exposed, device

    def wait(self) -> None:
        start = time.perf_counter()
        with self._exposed.timed(self._record.scope, self._device), _span("wait", self._record.scope):
            self._work.wait()
        self._record.wait_s += time.perf_counter() - start


class ObservedCommunicator(Wrapper):
    """``inner``, with a record of every operation in ``records`` (in the order of issue), its parts' among them.

    Records accumulate until `drain` takes them; what nothing hid accumulates in ``exposed``, until its own `take`.

    Args:
        inner: the communicator to observe.
        timed: whether records tell when each operation had ended, which costs a call on the thread that ended it.
    """

    def __init__(self, inner: Communicator, *, timed: bool = False) -> None:
        super().__init__(inner)
        self.timed = timed
        self.records: list[CommRecord] = []
        self.exposed = Exposed()

    def _around(self, op: str, whole: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Issue an operation and record it."""
        assert whole is not None, "a barrier is recorded by itself"
        start, label = time.perf_counter(), current_scope()
        with self.exposed.timed(label, whole.device, issuing=True), _span(op, label):
            work = issue()
        num_bytes = whole.nbytes
        record = CommRecord(op, num_bytes, label, self.world_size, time.perf_counter() - start, issued_at_s=start)
        self.records.append(record)
        if self.timed:
            record.label = with_phase(label)
            if whole.device.type == "cpu":
                add_done_callback(work, record.end)
        return _ObservedWork(work, record, self.exposed, whole.device)

    def barrier(self) -> None:
        """Record and pass on."""
        start, label = time.perf_counter(), current_scope()
        with self.exposed.timed(label, self.control_device, issuing=True):
            self.inner.barrier()
        self.records.append(CommRecord("barrier", 0, label, self.world_size, time.perf_counter() - start))

    def drain(self) -> list[CommRecord]:
        """Take the records so far."""
        records = list(self.records)
        self.records.clear()  # parts write into the same list
        return records

    def totals(self, *, control: bool = False) -> dict[str, int]:
        """Bytes by operation over the records held; control messages only where asked for."""
        total: Counter[str] = Counter()
        for record in self.records:
            if (record.scope == CONTROL) == control:
                total[record.op] += record.num_bytes
        return dict(total)
