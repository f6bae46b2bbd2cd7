"""The table of planned and measured memory and step time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dash import html

from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import pair_of, plan_of
from zeroshard.lab.run_folders import RunResult


def plans(runs: Mapping[str, RunResult], *, named: bool = True) -> list[Any]:
    """Rows with the planned and the measured values of each run that has a plan; ``named``: with a column of names."""
    rows: list[tuple[str, ...]] = []
    for name, run in runs.items():
        if plan := plan_of(run):
            rows += [(name, *cells) for cells in _pairs(run, plan)]
        elif run.start.get("plan"):
            measured = size(sum(run.steps[-1].memory_bytes.values())) if run.steps else ""
            rows.append((name, "so far", str(run.start["plan"]), measured, ""))
    if not rows:
        return [html.Tbody(html.Tr(html.Td("No run that is shown has a plan.")))]
    titles = ("run", "what", "planned", "measured", "measured / planned")
    head, *body = (row if named else row[1:] for row in (titles, *rows))
    return [
        html.Thead(html.Tr([html.Th(title, scope="col") for title in head])),
        html.Tbody([html.Tr([html.Td(cell) for cell in cells]) for cells in body]),
    ]


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
