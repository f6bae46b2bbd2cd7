"""What a run measures about itself beyond its step records: peak memory, a trace.

* Peak memory by category (``--profile.memory``) is recorded in the second step, because the first one creates the
  optimizer states.
* A trace (``--profile.trace-steps``) covers the given number of steps, from the third on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard.comm import Communicator, buffer_bytes
from zeroshard.host.regular_files import folder_inside
from zeroshard.parallel import Strategy
from zeroshard.settings.tables import ProfileConfig
from zeroshard.train.profiling.memory import COMM_BUFFERS, AllocationRecorder, in_order
from zeroshard.train.profiling.trace import RankTrace
from zeroshard.train.records.records import Callback, StepRecord

PEAK_STEP = 1  # counted from 0: the first step in which the optimizer states exist from the start


class Measures(Callback):
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
        self._recorder: AllocationRecorder | None = None
        self._recording = ExitStack()

    def before_step(self, step: int) -> None:
        """Begin to measure the step."""
        self._num_steps, number = self._num_steps + 1, self._num_steps
        if self._asked.trace_steps and number == PEAK_STEP + 1:
            self._trace = RankTrace(self._units, self._device)
            self._trace.start()
        if number == PEAK_STEP and self._asked.memory:
            self._recorder = AllocationRecorder(
                self._holdings, mapped="host_slots" not in self._strategy.memory_bytes()
            )
            self._recorder.follow(self._strategy.model, self._strategy.optimizer)
            self._recording.enter_context(self._recorder)
        elif number == PEAK_STEP and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_step(self, record: StepRecord) -> None:
        """End what was begun, if this is its last step."""
        if self._recorder is not None:
            self._recording.close()
            self._take_peak(self._recorder)
            self._recorder = None
        if self._num_steps == PEAK_STEP + 1 + self._asked.trace_steps:
            self._end_trace()

    def before_end(self, summary: dict[str, Any]) -> None:
        """Add the peak by category, if it was recorded."""
        if self._device.type == "cuda" and self._num_steps > PEAK_STEP:
            self.peak_bytes = torch.cuda.max_memory_allocated(self._device)
        if self._peak:
            summary["memory_peak"] = self._peak

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write a trace that the run's end cut short."""
        self._end_trace()

    def close(self) -> None:
        """Stop recording if an exception ended the step."""
        self._recording.close()

    def _holdings(self) -> Iterable[tuple[str, str, torch.Tensor]]:
        holdings = getattr(self._strategy, "holdings", None)
        return holdings() if holdings is not None else ()

    def _take_peak(self, recorder: AllocationRecorder) -> None:
        recorder.remove()
        peak = recorder.peak
        own = 0 if self._comm is None else buffer_bytes(self._comm)
        self.peak_bytes = peak.num_bytes
        by_category = in_order({**peak.by_category, COMM_BUFFERS: own})
        where = {"phase": peak.phase, "at": peak.operation}
        self._peak = {"bytes": peak.num_bytes + own, "by_category": by_category, **where}

    def _end_trace(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        path = folder_inside(self._folder, "trace") / f"rank-{self._strategy.comm.rank:05}.json"
        path.unlink(missing_ok=True)  # torch would write through a link
        trace.stop(path)
