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
GRAPHS = (*live.CURVES, "memory")
VIEWS = {
    "x": ("Horizontal axis", live.X_TITLES),
    "smoothing": ("Smoothing", live.SMOOTHINGS),
    "scale": ("Vertical scale", live.SCALES),
}
_ORDER = ("running", "done", "failed", "unfinished", "damaged")


def page() -> html.Div:
    """Its parts, still empty."""
    titles = {name: curve.title for name, curve in live.CURVES.items()} | {"memory": "Memory of rank 0, and its plan"}
    return html.Div(
        [
            html.P(id="summary", className="quiet", role="status"),
            _table("table", "Runs"),
            html.Label("Runs in the figures", htmlFor="chosen"),
            dcc.Dropdown(id="chosen", multi=True, placeholder="those that run, and the latest"),
            html.Div([_control(name) for name in VIEWS], className="controls"),
            html.Div([_graph(name, titles[name]) for name in GRAPHS], className="figures"),
            html.H2("Plan against actual"),
            _table("plans", "Plan against actual"),
            html.H2("Settings that differ"),
            _table("differences", "Settings that differ between the runs that are shown"),
        ]
    )


def _control(name: str) -> html.Div:
    title, choices = VIEWS[name]
    options = [{"label": text, "value": value} for value, text in choices.items()]
    dropdown = dcc.Dropdown(id=f"view-{name}", options=options, value=next(iter(choices)), clearable=False)
    return html.Div([html.Label(title, htmlFor=f"view-{name}"), dropdown])


def _graph(name: str, title: str) -> html.Figure:
    graph = dcc.Graph(id=f"graph-{name}", config=CONFIG)
    return html.Figure([html.H3(title), html.Div(graph, role="img", **{"aria-label": title})])


def _table(name: str, title: str) -> html.Div:
    """A table that scrolls by itself; the keyboard reaches it."""
    return html.Div(html.Table(id=name), className="scroll", tabIndex=0, role="region", **{"aria-label": title})


def view_of(x: Any, smoothing: Any, scale: Any) -> live.View:
    """What the controls ask for; what is none of their choices is the first of them."""
    asked = {"x": x, "smoothing": smoothing, "scale": scale}
    return live.View(
        **{name: value if value in VIEWS[name][1] else next(iter(VIEWS[name][1])) for name, value in asked.items()}
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


def summary(runs: Mapping[str, RunResult], root: str, num_unread: int = 0) -> str:
    """How many there are of each kind, and how many are still to be read."""
    states = [run.state for run in runs.values()]
    counts = ", ".join(f"{states.count(state)} {state}" for state in _ORDER if state in states)
    more = f"; {num_unread} more are being read" if num_unread else ""
    return f"{root}: {counts or 'no run yet; this page looks every 2 seconds'}{more}"


def table(runs: Mapping[str, RunResult], called: Mapping[str, str]) -> list[Any]:
    """One row a run, those that run first, under the sweep that they belong to; ``called``: `labels`."""
    titles = ("run", "state", "step", "loss", "tokens/s", "exposed", "memory of rank 0", "strategy", "ranks")
    ordered = sorted(runs.items(), key=lambda item: (_ORDER.index(item[1].state), called[item[0]]))
    groups: dict[str, list[Any]] = {}
    for name, run in ordered:
        groups.setdefault(sweep_of(name, run), []).append(_row(called[name], run))
    bodies = []
    for sweep, rows in groups.items():
        words = f"sweep {sweep}: {len(rows)} runs" if sweep else "single runs"
        head = [html.Tr(html.Th(words, colSpan=len(titles), scope="rowgroup"), className="group")]
        bodies.append(html.Tbody([*(head if any(groups) else []), *rows]))
    return [html.Thead(html.Tr([html.Th(title, scope="col") for title in titles])), *bodies]


def sweep_of(name: str, run: RunResult) -> str:
    """The path of the sweep that a run is a case of, as `Watch` names runs; empty where it is of none."""
    parents = run.folder.parents
    if len(parents) > 2 and (parents[2] / SWEEP).is_file():
        return "/".join(name.split("/")[:-3]) or parents[2].name
    return ""


def _row(name: str, run: RunResult) -> html.Tr:
    last = run.steps[-1] if run.steps else None
    of_all = run.setting("max_steps", "")
    cells = [
        f"{last.step if last else 0} of {of_all}" if of_all else "",
        f"{last.loss:.4f}" if last else "",
        f"{run.tokens_per_s:,.0f}" if math.isfinite(run.tokens_per_s) else "",
        f"{run.exposed_s / run.step_s:.0%}" if math.isfinite(run.exposed_s) and run.step_s else "",
        _memory_of(run),
        str(run.setting("strategy", "")),
        str(run.start.get("world_size", "")),
    ]
    why = html.Div("; ".join(run.problems), className="quiet") if run.problems else None
    state = html.Span(run.state, className=f"state {run.state}")
    return html.Tr([html.Td([name, why]), html.Td(state), *(html.Td(cell) for cell in cells)])


def _memory_of(run: RunResult) -> str:
    """The peak where it was recorded, else what is held between steps."""
    if run.peak_bytes:
        return f"{size(run.peak_bytes)} peak"
    return f"{size(run.held_bytes)} held" if run.held_bytes else "not measured"


def figures(runs: Mapping[str, RunResult], view: live.View = live.AS_WRITTEN) -> list[dict[str, Any]]:
    """As plotly has them, in the order of `GRAPHS`."""
    try:
        (held,) = memory([entry for entry in entries_of_runs(list(runs.values())) if entry.first is not None])
    except LeftOutError as why:
        held = Figure("memory", "", Axis(str(why)), Axis(""), ())
    curves = [live.curve(name, runs, view) for name in live.CURVES]
    return [_kept(as_plotly(figure), f"{view.x} {view.scale}") for figure in (*curves, held)]


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


def _kept(figure: dict[str, Any], axes: str) -> dict[str, Any]:
    """What the reader has zoomed into stays when data come, until the axes are others."""
    return {**figure, "layout": {**figure["layout"], "uirevision": axes}}
