"""Experiment trackers: TensorBoard, Weights & Biases, trackio. They are off unless asked for (``--track``).

A tracker implements three methods (`Tracker`). `TrackedRun` turns it into a callback and shields the run from it: the
first exception of a tracker is reported on stderr, and the run continues without that tracker. ``metrics.jsonl`` is
always written, whatever trackers there are.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from zeroshard.comm.wrappers.exposed import by_kind
from zeroshard.host.errors import UserError, warn
from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import folder_inside, read_text, write_inside
from zeroshard.settings.tables import TrackConfig
from zeroshard.settings.validate import by_dotted_name
from zeroshard.train.records.records import Callback, StepRecord

_RUN_ID = "tracker-id"  # name of a file in the run folder
_MIB = 2**20


class Tracker(Protocol):
    """Interface of an experiment tracker; any method may raise."""

    def start(self, facts: Mapping[str, Any]) -> None:
        """The run starts or resumes; ``facts`` are its configuration and fixed facts, by dotted name."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log values after ``step`` steps."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended; ``summary`` is empty if an exception ended it."""


class TensorBoardTracker:
    """Writes event files into ``FOLDER/tensorboard`` with torch's own writer; a resumed run adds a file."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._writer = folder, None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open the event file."""
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer = SummaryWriter(str(folder_inside(self._folder, "tensorboard")))
        self._writer.add_text("config", "\n".join(f"    {key} = {value}" for key, value in facts.items()))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write one scalar per value."""
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """Logs to Weights & Biases, and leaves to its variables what we have no setting for (WANDB_MODE, WANDB_TAGS).

    A run folder stays one W&B run however often it is resumed. Only if it is resumed from an earlier checkpoint than
    its newest does it become a new W&B run (`forget_run`). The step is logged as a metric of its own, over which the
    others are drawn, because W&B drops values of a step below the last one, and a resumed run repeats steps.
    """

    def __init__(self, folder: Path, config: TrackConfig) -> None:
        self._folder, self._config, self._run = folder, config, None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open the run."""
        wandb: Any = importlib.import_module("wandb")
        folder_inside(self._folder, "wandb")  # where it writes
        sys.argv[:] = map(masked, sys.argv)  # which wandb saves as the run's arguments
        self._run = wandb.init(
            project=self._config.project,
            name=self._config.name or self._folder.name,
            id=_run_id(self._folder),
            group=self._config.group or None,
            resume="allow",
            dir=str(self._folder),
            config=dict(facts),
            settings=wandb.Settings(silent=True, init_timeout=60),
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log all values at one step."""
        assert self._run is not None
        self._run.log({**values, "step": step})

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Set the summary, and close the run."""
        if self._run is not None:
            self._run.summary.update(dict(summary))
            self._run.finish(exit_code=0 if summary else 1)


class TrackioTracker:
    """Logs to trackio, which has the API of W&B and keeps the data on this machine.

    trackio knows a run by its name, so the name ends with the run's id: another run of this name is another run there.
    """

    def __init__(self, folder: Path, config: TrackConfig) -> None:
        self._folder, self._config, self._trackio = folder, config, None

    def start(self, facts: Mapping[str, Any]) -> None:
        """Open the run."""
        trackio = importlib.import_module("trackio")
        trackio.init(
            project=self._config.project,
            name=f"{self._config.name or self._folder.name} {_run_id(self._folder)[:6]}",
            group=self._config.group or None,
            config=dict(facts),
            resume="allow",
            embed=False,
        )
        self._trackio = trackio

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log all values at one step; the step is an argument, because trackio would rename a key ``step``."""
        assert self._trackio is not None
        self._trackio.log(dict(values), step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Close the run; trackio has no summary."""
        if self._trackio is not None:
            self._trackio.finish()


class TrackedRun(Callback):
    """A callback that passes a run's events on to a tracker, whose exceptions cannot disturb the run."""

    def __init__(self, name: str, tracker: Tracker, facts: Mapping[str, Any]) -> None:
        self._name, self._facts = name, facts
        self._tracker: Tracker | None = tracker
        self._summary: Mapping[str, Any] = {}

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Start the tracker."""
        self._try(lambda tracker: tracker.start({**by_dotted_name(self._facts), **by_dotted_name({"run": info})}))

    def on_step(self, record: StepRecord) -> None:
        """Log the numbers of the step."""
        self._try(lambda tracker: tracker.log(values_of(record), record.step))

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """Log the validation losses."""
        self._try(lambda tracker: tracker.log(values_of_eval(losses), step))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Keep the scalar values of the summary until `close` passes them on."""
        self._summary = {key: value for key, value in summary.items() if isinstance(value, str | int | float)}

    def close(self) -> None:
        """Finish the tracker; later calls do nothing."""
        self._try(lambda tracker: tracker.finish(self._summary))
        self._tracker = None

    def _try(self, call: Callable[[Tracker], None]) -> None:
        if self._tracker is None:
            return
        try:
            call(self._tracker)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- trackers raise what they like; some exit
            self._tracker = None
            why = " ".join(str(error).split()) or type(error).__name__
            warn(f"{self._name} failed ({why}); the run continues without it")


def trackers(config: TrackConfig, folder: Path, facts: Mapping[str, Any]) -> list[TrackedRun]:
    """Return a callback for each tracker that was asked for.

    Raises:
        UserError: one of them is not installed.
    """
    require_trackers(config)
    return [TrackedRun(name, make_tracker(name, config, folder), facts) for name in config.to]


def make_tracker(name: str, config: TrackConfig, folder: Path) -> Tracker:
    """The tracker ``name``, not started, of the run in ``folder``."""
    if name == "tensorboard":
        return TensorBoardTracker(folder)
    return {"wandb": WandbTracker, "trackio": TrackioTracker}[name](folder, config)


def require_trackers(config: TrackConfig, field: str = "track.to") -> None:
    """Raise UserError about ``field`` unless every tracker that was asked for is installed."""
    for name in config.to:
        if importlib.util.find_spec(name) is None:
            raise UserError(field, f"{name} is not installed", f"pip install 'zeroshard[{name}]'")


def values_of(record: StepRecord) -> dict[str, float]:
    """Return the numbers of a step by name, as ``train/loss``; unknown ones are left out.

    Trackers draw the names that are equal up to the slash beside each other.
    """
    waits = by_kind(record.exposed_s)
    found = {
        "train/loss": record.loss,
        "train/grad_norm": record.grad_norm,
        "train/lr": record.lr,
        "train/tokens": record.tokens,
        "train/num_skipped": record.num_skipped,
        "train/loss_scale": record.loss_scale,
        "speed/tokens_per_s": record.tokens_per_s,
        "speed/step_s": record.step_s,
        "speed/mfu": record.mfu,
        "speed/exposed_s": sum(record.exposed_s.values()) if record.exposed_s else None,
        "outer_step/difference_norm": record.outer_step.get("difference_norm"),
        "outer_step/num_bytes": record.outer_step.get("num_bytes"),
        "outer_step/loss": record.outer_step.get("loss"),
        **{f"exposed/{kind.replace('/', '_')}_ms": 1e3 * seconds for kind, seconds in waits.items()},
        **{f"memory/{name}_MiB": value / _MIB for name, value in record.memory_bytes.items() if value},
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def values_of_eval(losses: Mapping[str, float]) -> dict[str, float]:
    """Return the losses of `Callback.on_eval` as ``val/loss``, ``val/ema_loss`` and ``val/NAME/loss``."""
    names = {"val_loss": "val/loss", "ema_val_loss": "val/ema_loss"}
    return {names.get(name, f"val/{name.removeprefix('val_loss/')}/loss"): loss for name, loss in losses.items()}


def forget_run(folder: Path) -> None:
    """Delete the run's tracker id, so that W&B and trackio treat the run in ``folder`` as a new one from now on."""
    (folder / _RUN_ID).unlink(missing_ok=True)


def _run_id(folder: Path) -> str:
    """The id of the run at its trackers, kept in the run folder, so that a resumed run is the same run there."""
    try:
        return read_text(folder / _RUN_ID, follow=False)
    except FileNotFoundError:
        write_inside(folder, _RUN_ID, made := uuid.uuid4().hex[:12])
        return made
