"""Ends a run that skips too many steps in a row, and says which module made the first NaN/Inf."""

from __future__ import annotations

import sys

import torch

from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.diagnose import first_not_finite
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.saving import Saving
from zeroshard.train.loop.step import backward, step_seed
from zeroshard.train.records.records import Callback, StepRecord


class SkippedSteps(Callback):
    """Ends ``run`` when its guard or its loss scale gives up; ``saving`` knows what to resume from then."""

    def __init__(self, run: Run, saving: Saving) -> None:
        self._run, self._saving = run, saving

    def on_step(self, record: StepRecord) -> None:
        """End the run if it is given up. Collective."""
        if self._run.guard.given_up or (self._run.scaler and self._run.scaler.exhausted):
            self._complain(record)
            self._run.progress.status = ExitStatus.NOT_FINITE

    def _complain(self, record: StepRecord) -> None:
        """Print why the run is given up, and which module produced the first NaN/Inf; collective.

        The first of the ranks that step together prints it.
        """
        run, step = self._run, record.step - 1
        torch.manual_seed(step_seed(run.schedule.seed, step, run.strategy.comm.rank))
        origin = first_not_finite(run.strategy.model, run.together, lambda: backward(run, step))
        run.strategy.optimizer.zero_grad()
        if run.together.rank == 0:
            scale = "" if record.loss_scale is None else f" at a loss scale of {record.loss_scale:g}"
            print(
                f"error: step {record.step}: loss {record.loss} or gradient norm {record.grad_norm} is NaN/Inf{scale},"
                f" the last of {run.guard.num_skipped} skipped steps; the first NaN/Inf was {origin}; "
                f"lower lr, lengthen warmup_steps or set grad_clip, and {self._saving.sound()}",
                file=sys.stderr,
            )
