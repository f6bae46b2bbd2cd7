"""The pages in one Dash application.

All that it shows is text of React's, which is escaped. It asks this server for its scripts, and nobody else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from zeroshard.lab.dashboard import planner, run_page, runs
from zeroshard.lab.dashboard.labelled import labelled
from zeroshard.lab.dashboard.live import View
from zeroshard.lab.dashboard.plan_table import plans
from zeroshard.lab.dashboard.run_table import labels, latest
from zeroshard.lab.dashboard.watch import Watch

PAGES: Mapping[str, tuple[str, Callable[[], html.Div]]] = {
    "runs": ("Runs", runs.page),
    "run": ("Run", run_page.page),
    "planner": ("Planner", planner.page),
}
READ_S = 1.0  # of a refresh, spent on runs that were never read


def make_app(root: str | Path, clock: Callable[[], float] = time.perf_counter) -> Dash:
    """The application over the runs below ``root``.

    Args:
        root: folder that runs are in, at any depth.
        clock: that `READ_S` is read from, in seconds.
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
    """All pages, of which one is shown."""
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
            dcc.Interval(id="clock", interval=runs.REFRESH_MS),
            dcc.Store(id="seen"),
        ]
    )


def _answer_runs(app: Dash, watch: Watch) -> None:
    """The page of all runs, and which page is shown."""

    @app.callback(
        Output("summary", "children"),
        Output("table", "children"),
        Output("chosen", "options"),
        Output("one-run", "options"),
        Output("plans", "children"),
        Output("differences", "children"),
        *(Output(f"graph-{name}", "figure") for name in runs.GRAPHS),
        Output("seen", "data"),
        Input("clock", "n_intervals"),
        Input("chosen", "value"),
        *(Input(f"view-{name}", "value") for name in runs.VIEWS),
        State("seen", "data"),
    )
    def refresh(ticks: int | None, chosen: list[str] | None, x: str, smoothing: str, scale: str, seen: Any) -> Any:
        """What has changed on the page since this browser had ``seen``."""
        return _changes(watch, chosen, runs.view_of(x, smoothing, scale), seen)

    @app.callback(*(Output(f"page-{name}", "hidden") for name in PAGES), Input("tabs", "value"))
    def turn(tab: str) -> Any:
        """Which pages are hidden."""
        return tuple(tab != name for name in PAGES)


def _changes(watch: Watch, chosen: list[str] | None, view: View, seen: Any) -> Any:
    """The outputs of the page of all runs, in their order."""
    found = watch.runs(READ_S)
    names = chosen or sorted(latest(found))  # in an order of their own: whoever writes next changes no colours
    names = [name for name in names if name in found]
    shown = watch.whole({name: found[name] for name in names})
    parts = runs.parts_of_page(found, shown, view, root=watch.root.name, num_unread=watch.num_unread)
    sent = seen if isinstance(seen, dict) else {}
    marks = {name: list(part.marks) for name, part in parts.items()}
    changes = {name: part.since(sent.get(name)) for name, part in parts.items()}
    graphs = [changes[f"graph-{name}"] for name in runs.GRAPHS]
    options = changes["options"]
    tables = changes["plans"], changes["differences"]
    new = no_update if marks == sent else marks
    return changes["summary"], changes["table"], options, options, *tables, *graphs, new


def _answer_run(app: Dash, watch: Watch) -> None:
    """The page of one run."""

    @app.callback(
        Output("run-details", "children"),
        Input("one-run", "value"),
        Input("tabs", "value"),
    )
    def show_run(name: str | None, tab: str) -> Any:
        """The run called ``name``, else the one that was written last."""
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
    """The planner's page."""

    @app.callback(
        Output("answer", "children"),
        *(Input(f"plan-{name}", "value") for name in planner.CONTROLS),
        Input("tabs", "value"),
    )
    def replan(*given: Any) -> Any:
        """The plan for what the controls say."""
        *values, tab = given
        if tab != "planner":
            return no_update  # nobody looks, and a trace takes seconds
        return planner.answer(dict(zip(planner.CONTROLS, values, strict=True)))
