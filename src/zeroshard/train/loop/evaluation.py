"""Evaluates a run at its intervals and at its end, tells the losses, and remembers the lowest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from typing import Any

from zeroshard.data.base import EvalBatch
from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.run import Run, is_due
from zeroshard.train.loop.saving import Saving
from zeroshard.train.loop.validation_loss import evaluate
from zeroshard.train.loop.watchdog import PATIENCE_S, Alive
from zeroshard.train.records.records import Callback, StepRecord


class Evaluation(Callback):
    """The evaluations of ``run``; ``saving`` lets go of weights before others take their place, ``alive``: as there."""

    def __init__(self, run: Run, saving: Saving, alive: Alive) -> None:
        self._run, self._saving, self._alive = run, saving, alive
        self._losses: dict[str, float] = {}  # of the last evaluation

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Evaluate before the first step of a new run that evaluates at intervals."""
        if self._run.first_step == 0 and self._run.schedule.eval_interval:
            self._evaluate(0)

    def on_step(self, record: StepRecord) -> None:
        """Evaluate if it is due."""
        progress, interval = self._run.progress, self._run.schedule.eval_interval
        if progress.status == ExitStatus.OK and (progress.at_end or is_due(record.step, interval)):
            if not self._losses:
                self._alive(PATIENCE_S)  # the first evaluation may compile
            self._evaluate(record.step)
            self._run.best.record(record.step, self._losses["val_loss"])

    def before_end(self, summary: dict[str, Any]) -> None:
        """Add the last losses, and the lowest."""
        run = self._run
        ema = {} if run.strategy.ema is None else {"ema_val_loss": None}
        best = {} if run.best.step is None else {"best_step": run.best.step, "best_val_loss": run.best.loss}
        summary |= {"val_loss": None, **ema, **self._losses, **best}

    def _evaluate(self, step: int) -> None:
        self._losses = losses = self.losses(step)
        run = self._run
        run.tell(lambda each: each.on_eval(step, losses))
        if run.comm:
            run.comm.drain()  # the evaluation's collectives belong to no step
            run.comm.exposed.take_seconds()

    def losses(self, step: int) -> dict[str, float]:
        """Evaluate after ``step`` steps, and return the losses as `Callback.on_eval` gets them. Collective.

        Replicas that take local steps evaluate the global weights, the last that all of them had in common. An
        unfinished save may still read the weights, so it is settled before these or averages take their place.
        """
        run, strategy = self._run, self._run.strategy
        alive = self._saving.alive if step else lambda: None

        def loss_on(batches: Iterable[EvalBatch]) -> float:
            return evaluate(strategy.model, batches, strategy.comm, run.device, alive)

        if run.local_steps is not None:
            self._saving.settle()
        with nullcontext() if run.local_steps is None else run.local_steps.global_weights():
            found = {"val_loss": loss_on(run.corpus.eval_batches)}
            named = {f"val_loss/{name}": loss_on(batches) for name, batches in run.corpus.named_evals.items()}
        if strategy.ema is not None:
            self._saving.settle()
            with strategy.ema.weights():
                found["ema_val_loss"] = loss_on(run.corpus.eval_batches)
        return found | named
