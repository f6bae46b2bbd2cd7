"""The page of runs: which there are, how they come on, and whether they keep their plans."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from dash import dcc, html

from zeroshard.lab.dashboard import live
from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import entries_of_runs, pair_of, plan_of
from zeroshard.lab.report.figure import Axis, Figure
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.report.marks import LeftOutError
from zeroshard.lab.report.run_figures import memory
from zeroshard.lab.run_folders import RunResult
from zeroshard.lab.sweep.cases import in_words
from zeroshard.lab.sweep.results import SWEEP

REFRESH_MS = 2000
MOST_SHOWN = 6  # runs that are chosen where nobody has chosen
GRAPHS = ("loss", "tokens", "exposed", "memory")
_ORDER = ("running", "done", "failed", "unfinished", "damaged")


def page() -> html.Div:
    """Its parts, still empty."""
    return html.Div(
        [
            html.P(id="summary", className="quiet"),
            html.Div(html.Table(id="table"), className="scroll", tabIndex=0),
            html.Label("Runs in the figures", htmlFor="chosen"),
            dcc.Dropdown(id="chosen", multi=True, placeholder="those that run, and the latest"),
            html.Div(
                [
                    html.Figure([html.H3(title), dcc.Graph(id=f"graph-{name}", config=CONFIG)])
                    for name, title in zip(
                        GRAPHS,
                        (
                            "Loss",
                            "Tokens a second, all ranks",
                            "Exposed communication",
                            "Memory of rank 0, and its plan",
                        ),
                        strict=True,
                    )
                ],
                className="figures",
            ),
            html.H2("Plan against actual"),
            html.Div(html.Table(id="plans"), className="scroll", tabIndex=0),
        ]
    )


def latest(runs: Mapping[str, RunResult]) -> list[str]:
    """Names of runs to show where nobody has chosen: those that run, then those that wrote last."""

    def wrote_ns(run: RunResult) -> int:
        try:
            return (run.folder / "metrics.jsonl").stat().st_mtime_ns
        except OSError:
            return 0

    names = sorted(runs, key=lambda name: (runs[name].state != "running", -wrote_ns(runs[name])))
    return [name for name in names if runs[name].steps][:MOST_SHOWN]


def labels(runs: Mapping[str, RunResult]) -> dict[str, str]:
    """By name, what a run is called: its place, or of a sweep's case, which is named by a hash, what sets it apart."""
    found = {name: name for name in runs}
    names = {run.folder: name for name, run in runs.items()}
    cases = [run for run in runs.values() if len(run.folder.parents) > 2 and (run.folder.parents[2] / SWEEP).is_file()]
    for entry in entries_of_runs(cases):
        words = in_words(entry.apart)
        for run in entry.case.runs:
            repeat = f"  run {int(run.folder.name) + 1}" if run.folder.name.isdecimal() else ""
            found[names[run.folder]] = (words or names[run.folder]) + repeat
    twice = {label for label, count in Counter(found.values()).items() if count > 1}
    return {name: f"{label} ({name})" if label in twice else label for name, label in found.items()}


def summary(runs: Mapping[str, RunResult], root: str) -> str:
    """How many there are of each kind."""
    states = [run.state for run in runs.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
    return f"{root}: {counts or 'no run yet; this page looks every 2 seconds'}"


def table(runs: Mapping[str, RunResult], called: Mapping[str, str]) -> list[Any]:
    """One row a run, those that run first; ``called``: `labels`."""
    titles = ("run", "state", "step", "loss", "tokens/s", "exposed", "memory of rank 0", "strategy", "ranks")
    ordered = sorted(runs.items(), key=lambda item: (_ORDER.index(item[1].state), called[item[0]]))
    return [
        html.Thead(html.Tr([html.Th(title) for title in titles])),
        html.Tbody([_row(called[name], run) for name, run in ordered]),
    ]


def _row(name: str, run: RunResult) -> html.Tr:
    last = run.steps[-1] if run.steps else None
    of_all = run.setting("max_steps", "")
    cells = [
        f"{last.step if last else 0} of {of_all}" if of_all else "",
        f"{last.loss:.4f}" if last else "",
        f"{run.tokens_per_s:,.0f}" if math.isfinite(run.tokens_per_s) else "",
        f"{run.exposed_s / run.step_s:.0%}" if math.isfinite(run.exposed_s) and run.step_s else "",
        size(run.peak_bytes) if run.peak_bytes else "",
        str(run.setting("strategy", "")),
        str(run.start.get("world_size", "")),
    ]
    why = html.Div("; ".join(run.problems), className="quiet") if run.problems else None
    state = html.Span(run.state, className=f"state {run.state}")
    return html.Tr([html.Td([name, why]), html.Td(state), *(html.Td(cell) for cell in cells)])


def figures(runs: Mapping[str, RunResult]) -> list[dict[str, Any]]:
    """As plotly has them, in the order of `GRAPHS`."""
    try:
        (held,) = memory([entry for entry in entries_of_runs(list(runs.values())) if entry.first is not None])
    except LeftOutError as why:
        held = Figure("memory", "", Axis(str(why)), Axis(""), ())
    found = [live.loss(runs), live.tokens_per_s(runs), live.exposed(runs), held]
    return [_kept(as_plotly(figure)) for figure in found]


def plans(runs: Mapping[str, RunResult]) -> list[Any]:
    """What was planned and what came, of each run that has a plan."""
    rows = []
    for name, run in runs.items():
        if plan := plan_of(run):
            rows += [html.Tr([html.Td(name), *map(html.Td, cells)]) for cells in _pairs(run, plan)]
        elif run.start.get("plan"):
            measured = size(sum(run.steps[-1].memory_bytes.values())) if run.steps else ""
            rows.append(html.Tr([html.Td(name), html.Td("so far"), html.Td(str(run.start["plan"])), html.Td(measured)]))
    if not rows:
        return [html.Tbody(html.Tr(html.Td("No run that is shown has a plan.")))]
    titles = ("run", "", "planned", "measured", "measured / planned")
    return [html.Thead(html.Tr([html.Th(title) for title in titles])), html.Tbody(rows)]


def _pairs(run: RunResult, plan: Mapping[str, Any]) -> list[tuple[str, ...]]:
    found = []
    table = plan.get("memory_bytes")
    pairs = [pair for pair in table.values() if isinstance(pair, Mapping)] if isinstance(table, Mapping) else []
    held = [sum(pair.get(key) or 0 for pair in pairs) for key in ("predicted", "measured")]
    if all(held):
        found.append(("held", size(held[0]), size(held[1]), f"{held[1] / held[0]:.3f}"))
    for name, title, text in (("peak_bytes", "peak", size), ("step_s", "step", _milliseconds)):
        planned, measured = pair_of(run, name)
        ratio = f"{measured / planned:.3f}" if planned > 0 and measured > 0 else ""
        if planned > 0:
            found.append((title, text(planned), text(measured) if measured > 0 else "not measured", ratio))
    if plan.get("difference"):
        found.append(("differs", "", str(plan["difference"]), ""))
    return found


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _kept(figure: dict[str, Any]) -> dict[str, Any]:
    """What the reader has zoomed into stays when data come."""
    return {**figure, "layout": {**figure["layout"], "uirevision": "kept"}}
