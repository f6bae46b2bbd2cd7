"""What the report of a single run has in place of comparisons: a header, and curves over steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from zeroshard.lab.planner.show import size
from zeroshard.lab.report.figure import CYCLE, Axis, Figure, Series
from zeroshard.lab.report.marks import LeftOutError
from zeroshard.lab.report.run_figures import held, memory_unit, stacked, thinned
from zeroshard.lab.run_folders import RunResult
from zeroshard.parallel.registry import STRATEGIES
from zeroshard.settings.validate import by_dotted_name
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.records import StepRecord

MOST_KINDS = 6  # kinds of exposed communication with a curve of their own
_FROM_STAGE = {"optimizer": 1, "master": 1, "ema": 1, "grads": 2, "params": 3}  # the first stage that shards it
_FEW = 30  # points of a curve that are marked one by one
_NO_CHOICES = ("out", "resume", "data.dir")  # settings that say where a run lies, and not what it is


@dataclass(frozen=True)
class Curve:
    """A quantity that each step has, and the titles of its figure."""

    title: str
    y_title: str
    value: Callable[[StepRecord], float]
    from_zero: bool = True


CURVES: Mapping[str, Curve] = {
    "tokens": Curve("Tokens a second, all ranks", "tokens/s", lambda step: step.tokens_per_s),
    "step-time": Curve("Time of a step", "ms", lambda step: 1e3 * step.step_s),
    "exposed": Curve(
        "Exposed communication",
        "ms of a step, rank 0",
        lambda step: 1e3 * sum(step.exposed_s.values()) if step.exposed_s else math.nan,
    ),
    "lr": Curve("Learning rate", "learning rate", lambda step: step.lr),
    "grad-norm": Curve("Gradient norm before clipping", "gradient norm", lambda step: step.grad_norm, from_zero=False),
}


def header_of(run: RunResult) -> list[tuple[str, str]]:
    """(name, text) pairs: what ran, where, when and how long, on which data, and with which result."""
    start, about = run.start, run.start.get("about")
    facts = {str(name): str(text) for name, text in about.items()} if isinstance(about, dict) else {}
    where = ", ".join(str(start[name]) for name in ("host", "device") if start.get(name))
    rows = [
        ("state", run.state),
        ("command", str(start.get("command", ""))),
        ("started", _began(run)),
        ("took", _took(run)),
        ("host", where),
        ("commit", str(start.get("commit", ""))),
        *((name, facts.get(name, "")) for name in ("strategy", "comm", "model", "data", "batch", "compute")),
        ("tokens", f"{run.steps[-1].tokens:,} in {run.steps[-1].step:,} steps"),
        ("loss", _losses(run)),
        ("peak memory", size(run.peak_bytes) + " on rank 0" if run.peak_bytes else ""),
        ("not as by default", ", ".join(f"{name} {value}" for name, value in _chosen(run).items())),
    ]
    return [(name, text) for name, text in rows if text]


def curves_of(run: RunResult, name: str) -> Callable[[], list[Figure]]:
    """What draws the curve ``name`` of `CURVES`; it raises `LeftOutError` if the run has not measured it."""

    def draw() -> list[Figure]:
        """Draw it from the steps past the warm-up."""
        asked = CURVES[name]
        steps = _past_warm_up(run)
        points = [(step.step, value) for step in steps if math.isfinite(value := asked.value(step))]
        if not points:
            raise LeftOutError("the run has not recorded it")
        x, y = zip(*thinned(points), strict=True)
        marker = "circle" if len(points) < _FEW else ""
        series = [Series(asked.title, "line", CYCLE[0], tuple(map(float, x)), y, marker=marker)]
        if name == "exposed" and len(kinds := _kinds_exposed(run)) > 1:
            series += kinds
        y_axis = Axis(asked.y_title, from_zero=asked.from_zero)
        return [Figure(name, asked.title, Axis("step"), y_axis, tuple(series), curves=True)]

    return draw


def memory_of(run: RunResult) -> list[Figure]:
    """Resident memory of rank 0 by category: measured, planned if there is a plan, and what stage 0 would hold."""
    measured, planned = held(run)
    if not measured:
        raise LeftOutError("the run has not recorded its memory")
    found = {"measured": measured, "planned": planned, "stage 0": at_stage_zero(run, measured)}
    bars = {name: table for name, table in found.items() if table}
    unit, scale = memory_unit(bars.values())
    series = stacked(list(bars.values()), list(bars), scale)
    sums = ", ".join(f"{which} {size(sum(table.values()))}" for which, table in bars.items())
    caption = f"Held by rank 0 between backward and update, without activations: {sums}."
    if "stage 0" in bars:
        caption += " Stage 0 would hold every sharded tensor unsharded, and no buffers for gathering."
    axes = Axis("", ticks=dict(enumerate(bars))), Axis(unit, from_zero=True)
    return [Figure("memory", "Memory of a rank", *axes, tuple(series), caption, height=1.15)]


def at_stage_zero(run: RunResult, measured: dict[str, int]) -> dict[str, int]:
    """What rank 0 would hold at stage 0: each sharded category times the ranks that share it. Empty if not known."""
    entry = STRATEGIES.get(str(run.setting("strategy", "")))
    world_size, every = run.start.get("world_size"), run.setting("local_steps.every", 1)
    ranks = run.setting("shard_size", 0) or world_size
    if entry is None or not entry.planned or not isinstance(ranks, int) or ranks < 2 or every != 1:
        return {}
    if not entry.stage or run.setting("offload.state", "none") != "none":  # what left is under other names
        return {}
    return {
        name: measured[name] * (ranks if entry.stage >= first else 1)
        for name, first in _FROM_STAGE.items()
        if name in measured
    }


def _kinds_exposed(run: RunResult) -> list[Series]:
    """A curve for each kind of communication for which rank 0 waited, the longest first."""
    steps = _past_warm_up(run)
    total = Counter[str]()
    for step in steps:
        total.update(step.exposed_s)
    series = []
    for index, (kind, _) in enumerate(total.most_common(MOST_KINDS)):
        points = thinned([(step.step, 1e3 * step.exposed_s.get(kind, 0.0)) for step in steps])
        x, y = tuple(float(step) for step, _ in points), tuple(value for _, value in points)
        series.append(Series(kind, "line", CYCLE[(index + 1) % len(CYCLE)], x, y, dashed=True))
    return series


def _past_warm_up(run: RunResult) -> Sequence[StepRecord]:
    """All steps but the first, whose time would stretch the axis."""
    return run.steps[1:] or run.steps


def _began(run: RunResult) -> str:
    try:
        return f"{datetime.fromisoformat(run.begun):%Y-%m-%d %H:%M:%S %Z}"
    except ValueError:
        return ""


def _took(run: RunResult) -> str:
    """Time from the first to the last event, and in how much of it steps ran."""
    in_steps = sum(step.step_s for step in run.steps if math.isfinite(step.step_s))
    steps = f"{_duration(in_steps)} in steps"
    try:
        whole = datetime.fromisoformat(run.last_at) - datetime.fromisoformat(run.begun)
    except (ValueError, TypeError):
        return steps
    return f"{_duration(whole.total_seconds())}, of which {steps}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else str(timedelta(seconds=round(seconds)))


def _losses(run: RunResult) -> str:
    words = [f"{run.steps[-1].loss:.4f} at step {run.steps[-1].step:,}"]
    finite = [each for each in run.evaluations if math.isfinite(each.loss)]
    if finite:
        best = min(finite, key=lambda each: each.loss)
        words.append(f"validation {finite[-1].loss:.4f}, the lowest {best.loss:.4f} at step {best.step:,}")
    skipped = sum(step.skipped for step in run.steps)
    return "; ".join([*words, *([f"{skipped} steps skipped"] if skipped else [])])


def _chosen(run: RunResult) -> dict[str, Any]:
    """The given settings that differ from their defaults, by dotted name."""
    defaults = by_dotted_name(TrainConfig().model_dump(mode="json"))
    now = by_dotted_name(run.given)
    return {name: value for name, value in now.items() if name not in _NO_CHOICES and value != defaults.get(name)}
