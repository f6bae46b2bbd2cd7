"""What a run measures about itself beyond its step records: memory at three points, peak memory, overlap, a trace.

* Memory at three points (initialised, before and after the first update) is always measured; it costs three sums.
* Peak memory by category (``--profile.memory``) is recorded in the second step, because the first one creates the
  optimizer states.
* A trace (``--profile.trace-steps``) covers the given number of steps, from the third on.
* How long collectives took, and how much of that was hidden (``--profile.overlap``), is measured from the second step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from time import time
from typing import Any

import torch
from torch import nn

from zeroshard.comm import CONTROL, CommRecord, ObservedCommunicator, buffer_bytes, labelled
from zeroshard.parallel import Strategy
from zeroshard.profiling.memory import COMM_BUFFERS, AllocationRecorder, ThreePoints, held_bytes, in_order, reconciled
from zeroshard.profiling.overlap import TimedOperation, overlap, under_way
from zeroshard.profiling.trace import RankTrace, clock_offsets, merge_files
from zeroshard.train.config.sections import ProfileConfig

PEAK_STEP = 1  # counted from 0: the first step in which the optimizer states exist from the start
CLOCK_ROUNDS = 11


class Measures:
    """The measurements of one rank; a trace labels ``units`` and goes to ``trace/`` in the run folder.

    Attributes:
        peak_bytes: peak memory, without the communicators' own buffers: of `PEAK_STEP`, or on CUDA since the beginning
            of that step; None if it was not measured.
    """

    def __init__(
        self,
        asked: ProfileConfig,
        strategy: Strategy,
        comm: ObservedCommunicator | None,
        units: Iterable[tuple[str, nn.Module]],
        folder: Path,
        device: torch.device,
    ) -> None:
        self.peak_bytes: int | None = None
        self._asked, self._strategy, self._comm, self._device = asked, strategy, comm, device
        self._units, self._folder = list(units), folder / "trace"
        self._points = ThreePoints(strategy.optimizer, strategy.memory_bytes)
        self._peak: dict[str, Any] = {}
        self._trace: RankTrace | None = None
        self._operations: list[TimedOperation] = []  # collectives of the traced steps
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self._exposed_s: defaultdict[str, float] = defaultdict(float)
        self._num_steps = self._num_timed = 0

    @contextmanager
    def step(self) -> Generator[None]:
        """Measure the step that runs inside this block; enter it for every step. Collective if a trace ends."""
        number, self._num_steps = self._num_steps, self._num_steps + 1
        first_traced = PEAK_STEP + 1
        if self._asked.trace_steps and number == first_traced:
            self._trace = RankTrace(self._units, self._device)
            self._trace.start()
        if number == PEAK_STEP and self._asked.memory:
            with self._recorded():
                yield
        else:
            if number == PEAK_STEP and self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            yield
        if self._trace is not None and number == first_traced + self._asked.trace_steps - 1:
            self._end_trace()

    def add_step(self, records: Iterable[CommRecord], exposed_s: dict[str, float]) -> None:
        """Add a step's collectives and its exposed communication; the first step warms up and is left out of the sums.

        ``exposed_s``: seconds for which computation waited for collectives, by label.
        """
        operations = [
            TimedOperation(r.phase_label, r.issued_at_s, r.ended_at_s) for r in records if r.ended_at_s is not None
        ]
        if self._trace is not None:
            self._operations += operations
        if self._num_steps <= 1 or self._comm is None or not self._comm.timed:
            return
        self._num_timed += 1
        for label, seconds in under_way(operations).items():
            self._total_s[label] += seconds
        for label, seconds in exposed_s.items():
            self._exposed_s[label] += seconds

    def summary(self) -> dict[str, Any]:
        """Return the measurements for ``summary.json``, and write a trace that the run's end cut short. Collective."""
        if self._trace is not None:
            self._end_trace()
        found: dict[str, Any] = {"memory_points_bytes": self._points.bytes}
        if self._device.type == "cuda" and self._num_steps > PEAK_STEP:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
            found["allocator_bytes"] = reconciled(held_bytes(self._holdings()) or dict(self._strategy.memory_bytes()))
        if self._peak:
            found["memory_peak"] = self._peak
        if self._num_timed:
            each = overlap(self._total_s, self._exposed_s)
            found["overlap_s_per_step"] = {
                label: {
                    "total": value.total_s / self._num_timed,
                    "hidden": value.hidden_s / self._num_timed,
                    "exposed": value.exposed_s / self._num_timed,
                }
                for label, value in each.items()
            }
        return found

    def _holdings(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        holdings = getattr(self._strategy, "holdings", None)
        return holdings() if holdings is not None else ()

    @contextmanager
    def _recorded(self) -> Generator[None]:
        recorder = AllocationRecorder(self._holdings, mapped="host_slots" not in self._strategy.memory_bytes())
        recorder.follow(self._strategy.model, self._strategy.optimizer)
        with recorder:
            yield
        recorder.remove()
        peak = recorder.peak
        own = 0 if self._comm is None else buffer_bytes(self._comm)
        self.peak_bytes = peak.num_bytes
        by_category = in_order({**peak.by_category, COMM_BUFFERS: own})
        where = {"phase": peak.phase, "at": peak.operation}
        self._peak = {"bytes": peak.num_bytes + own, "by_category": by_category, **where}

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        comm = self._strategy.comm
        self._folder.mkdir(parents=True, exist_ok=True)
        paths = {rank: self._folder / f"rank-{rank:05}.json" for rank in range(comm.world_size)}
        trace.stop(paths[comm.rank], self._operations)
        self._operations = []
        offsets = self._clock_offsets()  # its barriers also make sure that every rank has written its file
        if comm.rank == 0:
            merge_files(paths, self._folder / "trace.json", offsets)

    def _clock_offsets(self) -> list[float]:
        comm = self._strategy.comm
        rounds = []
        with labelled(CONTROL):
            for _ in range(CLOCK_ROUNDS):
                comm.barrier()
                own = torch.tensor([time()], dtype=torch.float64, device=comm.control_device)
                readings = torch.empty(comm.world_size, dtype=torch.float64, device=comm.control_device)
                comm.all_gather(readings, own).wait()
                rounds.append(readings.tolist())
        if self._comm is not None:
            self._comm.drain()  # these collectives belong to no step
            self._comm.exposed.take_seconds()
        return clock_offsets(rounds)
