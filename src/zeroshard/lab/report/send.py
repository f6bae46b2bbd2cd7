"""Sends runs to an experiment tracker that did not follow them while they trained: ``zeroshard report RUNS --to``."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.regular_files import write_inside
from zeroshard.lab.report.entries import gather
from zeroshard.lab.run_folders import RunResult
from zeroshard.lab.sweep.results import SWEEP
from zeroshard.settings.tables import TRACKERS, TrackConfig
from zeroshard.settings.validate import by_dotted_name, nearest
from zeroshard.train.records.trackers import make_tracker, require_trackers, values_of, values_of_eval


def send_runs(folders: Sequence[str], to: str) -> int:
    """Send every run in ``folders`` to the tracker ``to``, each once; runs of a sweep are one group there.

    Raises:
        UserError: there is no such tracker, it is not installed, or there is no run.
    """
    if to not in TRACKERS:
        raise UserError("to", f"{to!r} is not a tracker", nearest(to, TRACKERS, f"choose of {', '.join(TRACKERS)}"))
    require_trackers(TrackConfig(to=(to,)), field="to")
    num_sent = 0
    for entry in gather(folders).entries:
        for run in entry.case.runs:
            if why := _why_not(run, to):
                print(f"{run.folder}: not sent, {why}")
                continue
            repeat = f", run {run.folder.name}" if len(entry.case.runs) > 1 else ""
            _send(run, to, f"{entry.label}{repeat}")
            num_sent += 1
    print(f"{num_sent} run{'s' * (num_sent != 1)} sent to {to}")
    return ExitStatus.OK


def _why_not(run: RunResult, to: str) -> str:
    if to in run.setting("track.to", ()) or (run.folder / f"sent-to-{to}").exists():
        return f"{to} has it already"
    if run.state == "running":
        return "it is still running"
    return "" if run.steps else "it has taken no step"


def _send(run: RunResult, to: str, name: str) -> None:
    sweep = next((folder for folder in run.folder.parents if (folder / SWEEP).is_file()), None)
    group = sweep.name if sweep and to != "tensorboard" else ""
    tracker = make_tracker(to, TrackConfig(to=(to,), name=name, group=group), run.folder)
    tracker.start(by_dotted_name({**run.config, "run": run.start}))
    for step in run.steps:
        tracker.log(values_of(step), step.step)
    for each in run.evaluations:
        losses = {"val_loss": each.loss, "ema_val_loss": each.ema_loss}
        losses = {name: loss for name, loss in losses.items() if name == "val_loss" or math.isfinite(loss)}
        losses |= {f"val_loss/{name}": loss for name, loss in each.named.items()}
        tracker.log(values_of_eval(losses), each.step)
    tracker.finish({name: value for name, value in run.summary.items() if isinstance(value, str | int | float)})
    write_inside(run.folder, f"sent-to-{to}", "")
