"""The table of runs: their labels, and a row for each run, grouped by sweep."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from dash import html

from zeroshard.lab.dashboard.changes import Part, mark
from zeroshard.lab.dashboard.watch import Seen
from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import entries_of_runs, words_of
from zeroshard.lab.run_folders import RunResult
from zeroshard.lab.sweep.results import SWEEP

TITLES = ("run", "state", "step", "loss", "tokens/s", "exposed", "memory of rank 0", "model", "strategy", "ranks")
MOST_SHOWN = 6  # most runs in the figures if the user has chosen none
_ORDER = ("running", "done", "failed", "unfinished", "damaged")


def latest(runs: Mapping[str, Seen]) -> list[str]:
    """The runs to show if the user has chosen none: running ones, then those that wrote to their log last."""

    def wrote_ns(run: RunResult) -> int:
        try:
            return (run.folder / "metrics.jsonl").stat().st_mtime_ns
        except OSError:
            return 0

    names = sorted(runs, key=lambda name: (runs[name].run.state != "running", -wrote_ns(runs[name].run)))
    return [name for name in names if runs[name].run.steps][:MOST_SHOWN]


def labels(runs: Mapping[str, RunResult]) -> dict[str, str]:
    """The label of each run, by name: its path, or for a sweep's case (named by a hash) the settings that differ."""
    found = {name: name for name in runs}
    names = {run.folder: name for name, run in runs.items()}
    cases = [run for run in runs.values() if len(run.folder.parents) > 2 and (run.folder.parents[2] / SWEEP).is_file()]
    for entry in entries_of_runs(cases):
        words = words_of(entry.apart)
        for run in entry.case.runs:
            repeat = f", run {int(run.folder.name) + 1}" if run.folder.name.isdecimal() else ""
            found[names[run.folder]] = (words or names[run.folder]) + repeat
    twice = {label for label, count in Counter(found.values()).items() if count > 1}
    return {name: f"{label} ({name})" if label in twice else label for name, label in found.items()}


def summary(runs: Mapping[str, RunResult], root: str, num_unread: int = 0) -> str:
    """A line with the number of runs in each state, and the number of runs that are still to be read."""
    states = [run.state for run in runs.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
    more = f"; {num_unread} more are being read" if num_unread else ""
    return f"{root}: {counts or 'no run yet; this page looks every 2 seconds'}{more}"


def part_of_table(runs: Mapping[str, Seen], called: Mapping[str, str]) -> Part:
    """The table: one row per run, running ones first, grouped by sweep; ``called``: the result of `labels`."""
    ordered = sorted(runs, key=lambda name: (_ORDER.index(runs[name].run.state), called[name]))
    groups: dict[str, list[str]] = {}
    for name in ordered:
        groups.setdefault(sweep_of(name, runs[name].run), []).append(name)
    places = [(body, place) for body, names in enumerate(groups.values(), 1) for place in range(len(names))]
    names = [name for group in groups.values() for name in group]
    num_heads = int(any(groups))

    def replace(patch: Any, number: int) -> None:
        body, place = places[number]
        name = names[number]
        patch[body]["props"]["children"][num_heads + place] = _row(called[name], runs[name].run)

    frame = repr([(sweep, [called[name] for name in group]) for sweep, group in groups.items()])
    marks = [mark(frame), *(runs[name].token for name in names)]
    return Part(marks, lambda: _table(groups, runs, called), replace)


def _table(groups: Mapping[str, Sequence[str]], runs: Mapping[str, Seen], called: Mapping[str, str]) -> list[Any]:
    bodies = []
    for sweep, names in groups.items():
        rows = [_row(called[name], runs[name].run) for name in names]
        words = f"sweep {sweep}: {len(rows)} runs" if sweep else "single runs"
        head = [html.Tr(html.Th(words, colSpan=len(TITLES), scope="rowgroup"), className="group")]
        bodies.append(html.Tbody([*(head if any(groups) else []), *rows]))
    return [html.Thead(html.Tr([html.Th(title, scope="col") for title in TITLES])), *bodies]


def sweep_of(name: str, run: RunResult) -> str:
    """The path of a run's sweep, relative as `Watch` names runs; empty if the run is not part of a sweep."""
    parents = run.folder.parents
    if len(parents) > 2 and (parents[2] / SWEEP).is_file():
        return "/".join(name.split("/")[:-3]) or parents[2].name
    return ""


def _row(name: str, run: RunResult) -> html.Tr:
    """The row of a run. Speeds are medians of the steps in ``run``: for a run from `Watch.runs` these are the last."""
    last = run.steps[-1] if run.steps else None
    of_all = run.setting("max_steps", "")
    cells = [
        f"{last.step if last else 0} of {of_all}" if of_all else "",
        f"{last.loss:.4f}" if last else "",
        f"{run.tokens_per_s:,.0f}" if math.isfinite(run.tokens_per_s) else "",
        f"{run.exposed_s / run.step_s:.0%}" if math.isfinite(run.exposed_s) and run.step_s else "",
        _memory_of(run),
        str(run.setting("model.name", "")),
        str(run.setting("strategy", "")),
        str(run.start.get("world_size", "")),
    ]
    why = html.Div("; ".join(run.problems), className="quiet") if run.problems else None
    state = html.Span(run.state, className=f"state {run.state}")
    return html.Tr([html.Td([name, why]), html.Td(state), *(html.Td(cell) for cell in cells)])


def _memory_of(run: RunResult) -> str:
    """The peak memory if it was recorded, else the memory that is resident between steps."""
    if run.peak_bytes:
        return f"{size(run.peak_bytes)} peak"
    return f"{size(run.held_bytes)} held" if run.held_bytes else "not measured"
