"""Both pages in one Dash application.

All that it shows is text of React's, which is escaped. It asks this server for its scripts, and nobody else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dash import Dash, Input, Output, State, dcc, html, no_update

from zeroshard.lab.dashboard import planner, runs
from zeroshard.lab.dashboard.watch import Watch


def make_app(root: str | Path) -> Dash:
    """The application over the runs below ``root``."""
    watch = Watch(root)
    app = Dash(
        "zeroshard",
        title="zeroshard",
        update_title="",
        assets_folder=str(Path(__file__).parent / "assets"),
        serve_locally=True,
        suppress_callback_exceptions=False,
    )
    app.layout = html.Main(
        [
            html.H1("zeroshard"),
            dcc.Tabs(
                [
                    dcc.Tab(runs.page(), label="Runs", value="runs"),
                    dcc.Tab(planner.page(), label="Planner", value="planner"),
                ],
                value="runs",
                id="tabs",
                mobile_breakpoint=0,  # side by side on any screen
            ),
            dcc.Interval(id="clock", interval=runs.REFRESH_MS),
            dcc.Store(id="seen"),
        ]
    )

    @app.callback(
        Output("summary", "children"),
        Output("table", "children"),
        Output("chosen", "options"),
        Output("plans", "children"),
        *(Output(f"graph-{name}", "figure") for name in runs.GRAPHS),
        Output("seen", "data"),
        Input("clock", "n_intervals"),
        Input("chosen", "value"),
        State("seen", "data"),
    )
    def refresh(ticks: int | None, chosen: list[str] | None, seen: Any) -> tuple[Any, ...]:
        found = watch.runs()
        names = [name for name in chosen or runs.latest(found) if name in found]
        now = [names, [[name, run.state, len(run.steps), len(run.evaluations)] for name, run in found.items()]]
        if now == seen:
            return (no_update,) * (5 + len(runs.GRAPHS))
        called = runs.labels(found)
        shown = {called[name]: found[name] for name in names}
        return (
            runs.summary(found, watch.root.name),
            runs.table(found, called),
            [{"label": called[name], "value": name} for name in found],
            runs.plans(shown),
            *runs.figures(shown),
            now,
        )

    @app.callback(
        Output("answer", "children"),
        *(Input(f"plan-{name}", "value") for name in planner.CONTROLS),
        Input("tabs", "value"),
    )
    def replan(*given: Any) -> Any:
        *values, tab = given
        if tab != "planner":
            return no_update  # nobody looks, and a trace takes seconds
        return planner.answer(dict(zip(planner.CONTROLS, values, strict=True)))

    return app
