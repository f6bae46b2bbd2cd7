"""A run's checkpoints: starts saves, reports how each went, and decides what failed saves mean for the exit status.

A full or unwritable disk does not stop a run: training continues, each failed save is reported, and the last good
checkpoint stays. But a run that ends without its last state on the disk ends with `ExitStatus.STORAGE`, and says which
step is there: else ``zeroshard train ... && zeroshard export ...`` would publish an old one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from math import isfinite
from typing import Any

from zeroshard.checkpoint import BEST, BackgroundSaver, Saved, is_complete, latest, name_best, step_name
from zeroshard.checkpoint.folder import identity, keep_identity
from zeroshard.comm.agree import largest
from zeroshard.host.errors import ExitStatus
from zeroshard.host.regular_files import folder_inside
from zeroshard.train.loop.outer_steps import guards_of_replicas
from zeroshard.train.loop.retention import Retention, is_skipping
from zeroshard.train.loop.run import Run, is_due
from zeroshard.train.loop.stopping import STOPPED
from zeroshard.train.loop.watchdog import PATIENCE_S, Alive
from zeroshard.train.records.records import Callback, StepRecord, Update, states_of
from zeroshard.train.state.folders import checkpoint_folder


class Saving(Callback):
    """Saves checkpoints of ``run``; every method but `alive`, `settle` and `close` is collective.

    Args:
        alive: `Watchdog.alive`; called whenever any rank has progressed with a save.

    Attributes:
        saved_at: the step of the last complete checkpoint, or the step at which the run began.
    """

    def __init__(self, run: Run, alive: Alive = lambda patience_s: None) -> None:
        self._run, self._folder, self._alive = run, checkpoint_folder(run.folder), alive
        schedule, first = run.schedule, run.strategy.comm.rank == 0
        self._retention = Retention(self._folder, schedule.keep_checkpoints, schedule.keep_every) if first else None
        self._saver = BackgroundSaver(
            run.strategy.comm,
            background=schedule.checkpoint_async,
            require_folder=self._require_folder,
            in_place=True,
            on_progress=self.alive,
        )
        self._hook = run.strategy.optimizer.register_step_pre_hook(lambda *_: self.settle())
        if run.local_steps is not None:
            run.local_steps.before_change = self.settle
        self._run_id = identity(self._folder) if first else ""
        self.saved_at = run.first_step
        self._wanted_at = run.first_step
        self._num_complete, self._last_error = 0, ""
        self._proven_at: int | None = None  # the last step whose weights an evaluation found to be sound

    def alive(self) -> None:
        """Tell the watchdog that a step or part of a save is done; it allows more time while a save is in flight."""
        self._alive(PATIENCE_S if self._saver.pending else 0.0)

    def begin(self, step: int, *, proven: bool = False) -> None:
        """Start to save the state after ``step`` steps; waits for an earlier save first.

        ``proven``: whether an evaluation of its weights had a finite loss.
        """
        run = self._run
        self._alive(PATIENCE_S)
        guards = [run.guard.state_dict()]
        if run.local_steps is not None:
            guards = guards_of_replicas(run.strategy.comm, run.together, run.guard)
        if self._retention is not None:
            skipping = any(map(is_skipping, guards))
            if run.local_steps is not None and not skipping:  # now alone this rank hears of other replicas' losses
                self._retention.proved()
            self._retention.wait()  # a disk that has room for one checkpoint more need not have it for two
            self._retention.began(step, proven=proven, skipping=skipping)
        extra: dict[str, Any] = {
            "run": self._run_id,
            "config": run.config or {},
            "position": position(run, step),
            "data_sha256": run.corpus.sha256,
        }
        if run.scaler:
            extra["loss_scaler"] = run.scaler.state_dict()
        extra["guard"] = run.guard.state_dict()
        if run.local_steps is not None:
            extra["guards"] = guards
        extra["best"] = run.best.state_dict()
        if states := states_of(run.callbacks):
            extra["callbacks"] = states
        path = self._folder / step_name(step)
        self._take(self._saver.start(path, run.strategy, step=step, extra=extra))
        self._wanted_at = step
        self.alive()

    def _require_folder(self) -> None:
        self._run.require_folder()
        folder_inside(self._run.folder, self._folder.name)
        keep_identity(self._folder, self._run_id)

    def settle(self) -> None:
        """Copy what the current save has not read yet; must be called before weights or their average change."""
        self._saver.settle()

    def on_update(self, update: Update) -> None:
        """Tell the watchdog that the step is done."""
        self.alive()

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """Note whether these weights have proved to be sound."""
        self._proven_at = step if isfinite(losses["val_loss"]) else None

    def on_step(self, record: StepRecord) -> None:
        """Report the current save if it has ended, and begin another if it is due."""
        self._take(self._saver.poll())
        if not record.skipped and self._retention is not None and self._run.local_steps is None:
            self._retention.proved()
        progress, schedule = self._run.progress, self._run.schedule
        is_best = schedule.keep_best and self._run.best.step == record.step
        wanted = is_best or progress.status in STOPPED or progress.at_end
        if not progress.failed and (wanted or is_due(record.step, schedule.checkpoint_interval)):
            self.begin(record.step, proven=self._proven_at == record.step)
        self.alive()

    def before_end(self, summary: dict[str, Any]) -> None:
        """Wait for the current save, settle the run's status, and add what was trained and saved."""
        progress, guard = self._run.progress, self._run.guard
        progress.status = self.finish(progress.status)
        summary |= {"tokens": self._run.tokens_at(progress.step), "num_skipped": guard.num_skipped}
        summary["last_checkpoint_step"] = self.saved_at

    def sound(self) -> str:
        """What to resume from after weights were ruined. On rank 0; not collective."""
        newest = self._retention.newest_sound() if self._retention is not None else None
        return f"--resume {newest}, the newest after which a loss was finite" if newest else "start anew"

    def finish(self, status: ExitStatus) -> ExitStatus:
        """Wait for the current save; return the run's exit status, given the ``status`` of its steps."""
        self.alive()
        self._take(self._saver.wait())
        self._alive(PATIENCE_S)
        first = self._retention is not None
        if self._retention is not None:
            self._retention.finish(skipping=is_skipping(self._run.guard.state_dict()))
        # Rank 0 looks whether the newest checkpoint that this run wrote is gone.
        is_gone = first and self._num_complete > 0 and not is_complete(self._folder / step_name(self.saved_at))
        is_gone = bool(largest(self._run.strategy.comm, is_gone))
        if self.saved_at == self._wanted_at and not is_gone:
            return status
        if first:
            newest = latest(self._folder)
            there = f"the newest checkpoint there is {newest.name}" if newest else "there is no checkpoint"
            why = "its checkpoint was removed while the run wrote there" if is_gone else self._last_error
            todo = "free space or choose another --out, then start again with --resume auto"
            self._say(f"error: {self._folder}: the state of step {self._wanted_at} is lost ({why}), {there}; {todo}")
        return ExitStatus.STORAGE if status in (ExitStatus.OK, *STOPPED) else status

    def close(self) -> None:
        """Stop the background writer; call it however the run ended."""
        self._hook.remove()
        self._saver.close()
        if self._retention is not None:
            self._retention.close()

    def _take(self, saved: Saved | None) -> None:
        if saved is None:
            return
        if saved.error:
            self._last_error = saved.error
            kept = f"step {self.saved_at} is the last good one" if self.saved_at else "there is none yet"
            self._say(f"warning: step {saved.step}: checkpoint not written: {saved.error}; {kept}, the run continues")
            self._run.tell(lambda each: each.on_checkpoint(saved.step, saved.path, {"error": saved.error}))
            return
        self.saved_at = saved.step
        self._name_best()
        self._num_complete += 1
        if self._retention is not None:
            self._retention.completed()
        num_bytes = None  # of all ranks
        if self._retention is not None:
            with suppress(OSError):  # files cannot be read any more
                num_bytes = sum(file.stat().st_size for file in saved.path.glob("*.safetensors"))
        facts = {
            "num_bytes": num_bytes,
            "num_copied_bytes": saved.num_copied_bytes,
            "stall_s": saved.stall_s,
            "total_s": saved.total_s,
        }
        self._run.tell(lambda each: each.on_checkpoint(saved.step, saved.path, facts))

    def _name_best(self) -> None:
        """Let ``best`` refer to the checkpoint of the lowest validation loss, which is then not deleted. On rank 0."""
        step = self._run.best.step if self._run.schedule.keep_best else None
        if step is None or self._run.strategy.comm.rank:
            return
        try:
            name_best(self._folder, step)
        except OSError as error:
            self._say(f"warning: {self._folder / BEST} cannot name step {step}, which may be deleted: {error.strerror}")

    def _say(self, line: str) -> None:
        if self._run.strategy.comm.rank == 0:
            print(line, file=sys.stderr, flush=True)


def position(run: Run, step: int) -> dict[str, Any]:
    """The run's position in its data, for a checkpoint: the step, and for a stream where to continue reading."""
    stream = run.corpus.position(step)
    return {
        **({"stream": stream} if stream else {}),
        "step": step,
        "tokens": run.tokens_at(step),
        "tokens_per_step": run.tokens_per_step,
        "seed": run.schedule.seed,
    }
