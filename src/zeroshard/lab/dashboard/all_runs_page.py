"""The page of all runs: their table, their curves, and plan against actual. Only changes are sent to the browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from dash import dcc, html

from zeroshard.lab.dashboard import step_curves
from zeroshard.lab.dashboard.changes import Part, mark, only_whole
from zeroshard.lab.dashboard.labelled import control, labelled, scrolling
from zeroshard.lab.dashboard.plan_table import plans
from zeroshard.lab.dashboard.run_page import differences
from zeroshard.lab.dashboard.run_table import labels, part_of_table, summary
from zeroshard.lab.dashboard.watch import Seen
from zeroshard.lab.report.entries import entries_of_runs
from zeroshard.lab.report.figure import Axis, Figure, Series
from zeroshard.lab.report.interactive import CONFIG, as_plotly
from zeroshard.lab.report.marks import LeftOutError
from zeroshard.lab.report.run_figures import memory
from zeroshard.lab.run_folders import RunResult

REFRESH_MS = 2000
GRAPHS = (*step_curves.CURVES, "memory")
VIEWS = {
    "x": ("Horizontal axis", step_curves.X_TITLES),
    "smoothing": ("Smoothing", step_curves.SMOOTHINGS),
    "scale": ("Vertical scale", step_curves.SCALES),
}


def page() -> html.Div:
    """The elements of the page, still empty."""
    titles = {name: curve.title for name, curve in step_curves.CURVES.items()} | {
        "memory": "Memory of rank 0, and its plan"
    }
    return html.Div(
        [
            html.P(id="summary", className="quiet", role="status"),
            scrolling(html.Table(id="table"), "Runs"),
            control(
                "Runs in the figures",
                dcc.Dropdown(id="chosen", multi=True, placeholder="those that run, and the latest"),
            ),
            html.Div([_control(name) for name in VIEWS], className="controls"),
            html.Div([_graph(name, titles[name]) for name in GRAPHS], className="figures"),
            html.H2("Plan against actual"),
            scrolling(html.Table(id="plans"), "Plan against actual"),
            html.H2("Settings that differ"),
            scrolling(html.Table(id="differences"), "Settings that differ between the runs that are shown"),
        ]
    )


def _control(name: str) -> html.Div:
    title, choices = VIEWS[name]
    options = [{"label": text, "value": value} for value, text in choices.items()]
    return control(title, dcc.Dropdown(id=f"view-{name}", options=options, value=next(iter(choices)), clearable=False))


def _graph(name: str, title: str) -> html.Figure:
    return html.Figure([html.H3(title), labelled(dcc.Graph(id=f"graph-{name}", config=CONFIG), "img", title)])


def view_of(x: Any, smoothing: Any, scale: Any) -> step_curves.View:
    """The view that the controls select; a value that is not one of a control's choices becomes its first choice."""
    asked = {"x": x, "smoothing": smoothing, "scale": scale}
    return step_curves.View(
        **{name: value if value in VIEWS[name][1] else next(iter(VIEWS[name][1])) for name, value in asked.items()}
    )


def parts_of_page(
    runs: Mapping[str, Seen], chosen: Mapping[str, Seen], view: step_curves.View, *, root: str, num_unread: int
) -> dict[str, Part]:
    """The parts of the page that change, by name.

    Args:
        runs: all runs, as listed in the table.
        chosen: the runs in the figures, with all steps.
        view: how curves are shown.
        root: name of the watched folder.
        num_unread: number of runs that are still to be read.
    """
    listed = {name: seen.run for name, seen in runs.items()}
    called = labels(listed)
    shown = {called[name]: seen for name, seen in chosen.items()}
    results = {label: seen.run for label, seen in shown.items()}
    words = summary(listed, root, num_unread)
    options = [{"label": called[name], "value": name} for name in listed]
    changes = repr([(label, seen.token) for label, seen in shown.items()])
    return {
        "summary": only_whole(words, lambda: words),
        "table": part_of_table(runs, called),
        "options": only_whole(repr(options), lambda: options),
        "plans": only_whole(changes, lambda: plans(results)),
        "differences": only_whole(changes, lambda: differences(results)),
        **{f"graph-{name}": part_of_curve(name, shown, view) for name in step_curves.CURVES},
        "graph-memory": only_whole(changes, lambda: _kept(as_plotly(held(results)), "memory")),
    }


def part_of_curve(name: str, shown: Mapping[str, Seen], view: step_curves.View) -> Part:
    """A figure of curves; when a run changes, only its lines and the figure's layout are sent again."""
    own = [(seen.token, _lines(name, label, seen, i, view)) for i, (label, seen) in enumerate(shown.items())]
    figure = step_curves.figure_of(name, [line for _, lines in own for line in lines], view)
    axes = f"{view.x} {view.scale}"

    def replace(patch: Any, number: int) -> None:
        drawn = _kept(as_plotly(figure), axes)
        patch["data"][number], patch["layout"] = drawn["data"][number], drawn["layout"]

    frame = repr((view, [(label, len(lines)) for label, (_, lines) in zip(shown, own, strict=True)]))
    marks = [mark(frame), *(token for token, lines in own for _ in lines)]
    return Part(marks, lambda: _kept(as_plotly(figure), axes), replace)


@lru_cache(maxsize=512)
def _lines(name: str, label: str, seen: Seen, index: int, view: step_curves.View) -> Sequence[Series]:
    return step_curves.lines(name, label, seen.run, index, view)


def held(runs: Mapping[str, RunResult]) -> Figure:
    """Resident memory of rank 0 by category, measured and planned; an empty figure says why there is none."""
    try:
        (found,) = memory([entry for entry in entries_of_runs(list(runs.values())) if entry.first is not None])
    except LeftOutError as why:
        return Figure("memory", "", Axis(str(why)), Axis(""), ())
    return found


def _kept(figure: dict[str, Any], axes: str) -> dict[str, Any]:
    """Keep the user's zoom when new data arrive, as long as ``axes`` stays the same."""
    return {**figure, "layout": {**figure["layout"], "uirevision": axes}}
