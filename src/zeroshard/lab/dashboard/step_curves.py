"""Curves of runs as figures: over steps, tokens or time, smoothed or not, on a linear or logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from zeroshard.lab.metrics_log import NAMED
from zeroshard.lab.report.figure import CYCLE, SET_MARKERS, Axis, Figure, Series
from zeroshard.lab.run_folders import RunResult, Step, validation_sets

MOST_POINTS = 400
MIB = 2**20
X_TITLES = {"step": "step", "tokens": "tokens", "time": "minutes of training"}
SMOOTHINGS = {"0": "none", "0.6": "0.6", "0.9": "0.9", "0.97": "0.97"}  # weight of the previous average
SCALES = {"linear": "linear", "log": "logarithmic"}


@dataclass(frozen=True)
class View:
    """How curves are shown; the attributes are keys of `X_TITLES`, `SMOOTHINGS` and `SCALES`."""

    x: str = "step"
    smoothing: str = "0"
    scale: str = "linear"


AS_WRITTEN = View()


@dataclass(frozen=True)
class Curve:
    """A quantity that each step has, and the titles of its figure."""

    title: str
    y_title: str
    value: Callable[[Step], float]
    from_zero: bool = True


CURVES: Mapping[str, Curve] = {
    "loss": Curve("Loss", "nats per token", lambda step: step.loss, from_zero=False),
    "tokens": Curve("Tokens a second, all ranks", "tokens/s", lambda step: step.tokens_per_s),
    "step-time": Curve("Time of a step", "ms", lambda step: 1e3 * step.step_s),
    "exposed": Curve(
        "Exposed communication",
        "ms of a step, rank 0",
        lambda step: 1e3 * sum(step.exposed_s.values()) if step.exposed_s else math.nan,
    ),
    "lr": Curve("Learning rate", "learning rate", lambda step: step.lr),
    "grad-norm": Curve("Gradient norm before clipping", "gradient norm", lambda step: step.grad_norm, from_zero=False),
    "held": Curve(
        "Training state held by rank 0",
        "MiB",
        lambda step: sum(step.memory_bytes.values()) / MIB if step.memory_bytes else math.nan,
    ),
}


def curve(name: str, runs: Mapping[str, RunResult], view: View) -> Figure:
    """The curve ``name`` of `CURVES` for each of ``runs``; validation losses as diamonds.

    If no run has measured it, the title of the x axis says so.
    """
    every = [lines(name, label, run, index, view) for index, (label, run) in enumerate(runs.items())]
    return figure_of(name, [line for own in every for line in own], view)


def lines(name: str, label: str, run: RunResult, index: int, view: View) -> list[Series]:
    """The curve ``name`` of one run; ``index``, its position among the shown runs, chooses the colour."""
    asked, series = CURVES[name], []
    places = places_of(run.steps, view.x)
    steps = run.steps[1:] or run.steps  # the first step is warm-up: its time would stretch the axis
    points = [(places[step.step], value) for step in steps if math.isfinite(value := asked.value(step))]
    colour = CYCLE[index % len(CYCLE)]
    if points:
        x, y = zip(*points, strict=True)
        shown = _thinned(list(zip(x, smoothed(y, float(view.smoothing)), strict=True)))
        x, y = zip(*((_in_digits(x, 9), _in_digits(y, 6)) for x, y in shown), strict=True)
        series.append(Series(label, "line", colour, x, y, marker="circle" if len(points) < 30 else ""))
    if name == "loss":
        series += _evaluations(label, run, places, colour)
    return series


def figure_of(name: str, series: Sequence[Series], view: View) -> Figure:
    """The figure of the curve ``name``; ``series``: the `lines` of all runs."""
    asked = CURVES[name]
    x_axis = Axis(X_TITLES[view.x] if series else "not measured in these runs")
    log = view.scale == "log" and all(value > 0 for each in series for value in each.y) and bool(series)
    y_axis = Axis(asked.y_title, log=log, from_zero=asked.from_zero and not log)
    return Figure(name, asked.title, x_axis, y_axis, tuple(series))


def places_of(steps: Sequence[Step], x: str) -> dict[int, float]:
    """The position of each step on the axis ``x``: its number, tokens so far, or minutes spent in steps so far."""
    if x == "tokens":
        return {step.step: float(step.tokens) for step in steps}
    if x == "time":
        minutes = accumulate(step.step_s / 60 if math.isfinite(step.step_s) else 0.0 for step in steps)
        return {step.step: place for step, place in zip(steps, minutes, strict=True)}
    return {step.step: float(step.step) for step in steps}


def smoothed(values: Sequence[float], weight: float) -> list[float]:
    """The exponential moving average of ``values``, with Adam's bias correction so that it does not begin near 0."""
    found, total, share = [], 0.0, 0.0
    for value in values:
        total, share = weight * total + (1 - weight) * value, weight * share + (1 - weight)
        found.append(total / share)
    return found


def _evaluations(label: str, run: RunResult, places: Mapping[int, float], colour: str) -> list[Series]:
    """Points of the validation loss (diamonds), and of each further validation set, which the legend names."""
    done = [each for each in run.evaluations if each.step in places]
    of_set = {"": [(places[each.step], each.loss) for each in done]}
    for name in validation_sets(run):
        of_set[name] = [(places[each.step], each.named.get(name, math.nan)) for each in done]
    series = []
    for index, (name, found) in enumerate(of_set.items()):
        points = [(x, y) for x, y in found if math.isfinite(y)]
        if points:
            x, y = zip(*points, strict=True)
            named, note = (
                (f"{label}, {NAMED}{name}", f"{label}, {NAMED}{name}") if name else ("", f"{label}, validation")
            )
            marker = SET_MARKERS[index % len(SET_MARKERS)]
            series.append(Series(named, "points", colour, x, y, marker=marker, notes=(note,) * len(points)))
    return series


def _in_digits(value: float, digits: int) -> float:
    """Round to the digits that a figure can show, which makes the data sent to the page a third smaller."""
    return float(f"{value:.{digits}g}")


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    every = -(-len(points) // MOST_POINTS) or 1
    return [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]
