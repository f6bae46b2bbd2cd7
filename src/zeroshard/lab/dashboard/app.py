"""The dashboard's pages in one Dash application.

React renders all texts, and escapes them. Scripts come from this server alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from zeroshard.lab.dashboard import all_runs_page, planner, run_page
from zeroshard.lab.dashboard.labelled import labelled
from zeroshard.lab.dashboard.plan_table import plans
from zeroshard.lab.dashboard.run_table import labels, latest
from zeroshard.lab.dashboard.step_curves import View
from zeroshard.lab.dashboard.watch import Watch

PAGES: Mapping[str, tuple[str, Callable[[], html.Div]]] = {
    "runs": ("Runs", all_runs_page.page),
    "run": ("Run", run_page.page),
    "planner": ("Planner", planner.page),
}
READ_S = 1.0  # seconds of a refresh for reading runs that were never read before


def make_app(root: str | Path, clock: Callable[[], float] = time.perf_counter) -> Dash:
    """Make the application that shows the runs below ``root``.

    Args:
        root: folder that has runs at any depth.
        clock: returns seconds; `READ_S` is measured with it.
    """
    watch = Watch(root, clock)
    app = Dash(
        "zeroshard",
        title="zeroshard",
        update_title="",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        suppress_callback_exceptions=False,
    )
    app.layout = _layout()
    _answer_runs(app, watch)
    _answer_run(app, watch)
    _answer_planner(app)
    return app


def _layout() -> html.Main:
    """All pages; all but one are hidden."""
    return html.Main(
        [
            html.H1("zeroshard"),
            labelled(
                dcc.RadioItems(  # dcc.Tabs cannot be reached by the keyboard
                    {name: title for name, (title, _) in PAGES.items()}, value="runs", id="tabs", labelClassName="tab"
                ),
                "navigation",
                "Pages",
            ),
            *(html.Div(page(), id=f"page-{name}", hidden=name != "runs") for name, (_, page) in PAGES.items()),
            dcc.Interval(id="clock", interval=all_runs_page.REFRESH_MS),
            dcc.Store(id="seen"),
        ]
    )


def _answer_runs(app: Dash, watch: Watch) -> None:
    """Register the callbacks of the page of all runs, and of the choice of a page."""

    @app.callback(
        Output("summary", "children"),
        Output("table", "children"),
        Output("chosen", "options"),
        Output("one-run", "options"),
        Output("plans", "children"),
        Output("differences", "children"),
        *(Output(f"graph-{name}", "figure") for name in all_runs_page.GRAPHS),
        Output("seen", "data"),
        Input("clock", "n_intervals"),
        Input("chosen", "value"),
        *(Input(f"view-{name}", "value") for name in all_runs_page.VIEWS),
        State("seen", "data"),
    )
    def refresh(ticks: int | None, chosen: list[str] | None, x: str, smoothing: str, scale: str, seen: Any) -> Any:
        """The changes of the page since the marks ``seen``, which the browser stores."""
        return _changes(watch, chosen, all_runs_page.view_of(x, smoothing, scale), seen)

    @app.callback(*(Output(f"page-{name}", "hidden") for name in PAGES), Input("tabs", "value"))
    def turn(tab: str) -> Any:
        """Whether each page is hidden."""
        return tuple(tab != name for name in PAGES)


def _changes(watch: Watch, chosen: list[str] | None, view: View, seen: Any) -> Any:
    """The outputs of the page of all runs, in the order of the callback."""
    found = watch.runs(READ_S)
    names = chosen or sorted(latest(found))  # sorted by name, so that a run's colour does not depend on who wrote last
    names = [name for name in names if name in found]
    shown = watch.whole({name: found[name] for name in names})
    parts = all_runs_page.parts_of_page(found, shown, view, root=watch.root.name, num_unread=watch.num_unread)
    sent = seen if isinstance(seen, dict) else {}
    marks = {name: list(part.marks) for name, part in parts.items()}
    changes = {name: part.since(sent.get(name)) for name, part in parts.items()}
    graphs = [changes[f"graph-{name}"] for name in all_runs_page.GRAPHS]
    options = changes["options"]
    tables = changes["plans"], changes["differences"]
    new = no_update if marks == sent else marks
    return changes["summary"], changes["table"], options, options, *tables, *graphs, new


def _answer_run(app: Dash, watch: Watch) -> None:
    """Register the callback of the page of one run."""

    @app.callback(
        Output("run-details", "children"),
        Input("one-run", "value"),
        Input("tabs", "value"),
    )
    def show_run(name: str | None, tab: str) -> Any:
        """The details of the run ``name``; None: of the latest run that has steps, running ones first."""
        if tab != "run":
            return no_update
        found = watch.runs(READ_S)
        name = name or next(iter(latest(found)), None)
        if name not in found:
            return [html.P("There is no run yet that has taken a step.", className="quiet")]
        run = watch.whole({name: found[name]})[name].run
        called = labels({each: seen.run for each, seen in found.items()})[name]
        return run_page.details(called, run, plans({called: run}, named=False))


def _answer_planner(app: Dash) -> None:
    """Register the callback of the planner's page."""

    @app.callback(
        Output("answer", "children"),
        *(Input(f"plan-{name}", "value") for name in planner.CONTROLS),
        Input("tabs", "value"),
    )
    def replan(*given: Any) -> Any:
        """The plan for the values of the controls."""
        *values, tab = given
        if tab != "planner":
            return no_update  # the page is hidden, and tracing a model takes seconds
        return planner.answer(dict(zip(planner.CONTROLS, values, strict=True)))
