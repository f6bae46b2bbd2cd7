"""What runs do step by step, as figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from zeroshard.lab.report.figure import CYCLE, Axis, Figure, Series
from zeroshard.lab.run_folders import RunResult, Step

MOST_POINTS = 400
_Value = Callable[[Step], float]


def loss(runs: Mapping[str, RunResult]) -> Figure:
    """Of training, and of validation as diamonds."""
    series = _curves(runs, lambda step: step.loss)
    for index, (name, run) in enumerate(runs.items()):
        if run.evaluations:
            steps = tuple(float(each.step) for each in run.evaluations)
            losses = tuple(each.loss for each in run.evaluations)
            series.append(
                Series(
                    "",
                    "points",
                    _colour(index),
                    steps,
                    losses,
                    marker="diamond",
                    notes=(f"{name}, validation",) * len(steps),
                )
            )
    return Figure("loss", "Loss", Axis("step"), Axis("nats per token"), tuple(series))


def tokens_per_s(runs: Mapping[str, RunResult]) -> Figure:
    """All ranks together."""
    series = _curves(runs, lambda step: step.tokens_per_s)
    return Figure("tokens", "Tokens a second", Axis("step"), Axis("tokens/s", from_zero=True), tuple(series))


def exposed(runs: Mapping[str, RunResult]) -> Figure:
    """Communication that nothing hid, on rank 0."""
    series = _curves(runs, lambda step: 1e3 * sum(step.exposed_s.values()))
    return Figure(
        "exposed", "Exposed communication", Axis("step"), Axis("ms of a step, rank 0", from_zero=True), tuple(series)
    )


def _curves(runs: Mapping[str, RunResult], value: _Value) -> list[Series]:
    """The first step warms up, and would hide the others."""
    series = []
    for index, (name, run) in enumerate(runs.items()):
        steps = _thinned(run.steps[1:] or run.steps)
        points = [(float(step.step), value(step)) for step in steps if math.isfinite(value(step))]
        if points:
            x, y = zip(*points, strict=True)
            series.append(Series(name, "line", _colour(index), x, y, marker="circle" if len(points) < 30 else ""))
    return series


def _thinned(steps: Sequence[Step]) -> Sequence[Step]:
    every = -(-len(steps) // MOST_POINTS) or 1
    return [*steps[::every], *(steps[-1:] if (len(steps) - 1) % every else [])]


def _colour(index: int) -> str:
    return CYCLE[index % len(CYCLE)]
