"""What a run measures about itself beyond its step records: peak memory, a trace.

* Peak memory by category (``--profile.memory``) is recorded in the second step, because the first one creates the
  optimizer states.
* A trace (``--profile.trace-steps``) covers the given number of steps, from the third on.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm import Communicator, buffer_bytes
from zeroshard.host.regular_files import folder_inside
from zeroshard.parallel import Strategy
from zeroshard.train.config.sections import ProfileConfig
from zeroshard.train.profiling.memory import COMM_BUFFERS, AllocationRecorder, in_order
from zeroshard.train.profiling.trace import RankTrace

PEAK_STEP = 1  # counted from 0: the first step in which the optimizer states exist from the start


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
        comm: Communicator | None,
        units: Iterable[tuple[str, nn.Module]],
        folder: Path,
        device: torch.device,
    ) -> None:
        self.peak_bytes: int | None = None
        self._asked, self._strategy, self._comm, self._device = asked, strategy, comm, device
        self._units, self._folder = list(units), folder
        self._peak: dict[str, Any] = {}
        self._trace: RankTrace | None = None
        self._num_steps = 0

    @contextmanager
    def step(self) -> Generator[None]:
        """Measure the step that runs inside this block; enter it for every step."""
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

    def summary(self) -> dict[str, Any]:
        """Return the measurements for ``summary.json``, and write a trace that the run's end cut short."""
        if self._trace is not None:
            self._end_trace()
        found: dict[str, Any] = {}
        if self._device.type == "cuda" and self._num_steps > PEAK_STEP:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if self._peak:
            found["memory_peak"] = self._peak
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
        path = folder_inside(self._folder, "trace") / f"rank-{self._strategy.comm.rank:05}.json"
        path.unlink(missing_ok=True)  # torch would write through a link
        trace.stop(path)
