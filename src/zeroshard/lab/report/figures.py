"""Makes the figures of a report, and explains those that are missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from zeroshard.lab.report.entries import Entry, ReportContents
from zeroshard.lab.report.figure import Figure
from zeroshard.lab.report.marks import LeftOutError, numbered
from zeroshard.lab.report.run_figures import loss, memory, predictions
from zeroshard.lab.report.single_run import curves_of, memory_of
from zeroshard.lab.report.speed import communication, throughput
from zeroshard.lab.run_folders import RunResult

_COMPARED = ("throughput", "scaling", "communication")  # figures in which readers compare lines or bars
_LOG_FROM = 5.0  # least ratio of the largest to the smallest value for which a logarithmic axis is kept
Drawn = tuple[list[Figure], list[str]]  # figures, and a line for each kind that could not be drawn


def figures_of(material: ReportContents) -> Drawn:
    """Every figure for which there are data, and a line for each kind of figure without data."""
    entries = [entry for entry in material.entries if entry.first is not None]
    run = material.only_run
    compared: dict[str, Callable[[], list[Figure]]] = {
        "Throughput": lambda: throughput(entries),
        "Communication": lambda: communication(entries),
        "Loss": lambda: loss(entries),
        "Memory": lambda: memory(entries),
    }
    kinds: dict[str, Callable[[], list[Figure]]] = {
        **(compared if run is None else _of_one(run, entries)),
        "Predicted against measured": lambda: predictions(entries),
    }
    figures: list[Figure] = []
    missing: list[str] = []
    for kind, draw in kinds.items():
        try:
            figures += [_with_note(_rightly_scaled(figure), entries) for figure in draw()]
        except LeftOutError as why:
            missing.append(f"{kind}: {why}")
    return numbered(figures), missing


def _of_one(run: RunResult, entries: Sequence[Entry]) -> dict[str, Callable[[], list[Figure]]]:
    """What draws the figures of a report of one run: nothing to compare, but all of its curves."""
    return {
        "Loss": lambda: loss(entries),
        "Learning rate": curves_of(run, "lr"),
        "Gradient norm": curves_of(run, "grad-norm"),
        "Tokens a second": curves_of(run, "tokens"),
        "Time of a step": curves_of(run, "step-time"),
        "Memory": lambda: memory_of(run),
        "Exposed communication": curves_of(run, "exposed"),
    }


def _rightly_scaled(figure: Figure) -> Figure:
    """Make a logarithmic y axis linear, unless the values differ by more than a factor of `_LOG_FROM`."""
    values = [value for series in figure.series for value in series.y if math.isfinite(value)]
    if not figure.y.log or figure.name.startswith("predicted"):
        return figure
    if values and min(values) > 0 and max(values) / min(values) > _LOG_FROM:
        return figure
    return replace(figure, y=replace(figure.y, log=False, from_zero=True))


def _with_note(figure: Figure, entries: Sequence[Entry]) -> Figure:
    """Say in the caption of a comparison how many repeats are behind it, so that nobody concludes from noise."""
    counts = [len(entry.case.done) for entry in entries if entry.case.done]
    if not figure.name.startswith(_COMPARED) or not counts:
        return figure
    note, single = "Whiskers: from the lowest to the highest repeat.", counts.count(1)
    if single == len(counts):
        note = "One run each: do not conclude from small differences."
    elif single:
        note = f"Whiskers: lowest to highest repeat. {single} of {len(counts)} ran once: do not conclude from those."
    return replace(figure, caption=f"{figure.caption} {note}".strip())
