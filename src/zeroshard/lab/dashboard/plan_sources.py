"""The folded section below the planner's answer: the sources of a plan's numbers, and their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence

from dash import html

from zeroshard.lab.dashboard.labelled import scrolling
from zeroshard.lab.planner.advice import describe
from zeroshard.lab.planner.explain import LEGEND, traffic
from zeroshard.lab.planner.plan_rows import Plan
from zeroshard.lab.planner.sources import BESIDE, RATES, beside_engine, memory, on_top, ranges, rates


def sources(found: Plan) -> html.Details:
    """The rates, memory and traffic that `zeroshard plan --explain` prints, for the row that the plan advises.

    If no row fits, the row that needs the least memory is shown. Nothing is simulated again: the plan has all data.
    """
    row = found.best or min(found.rows, key=lambda row: row.needed_bytes)
    named = describe(row, found.cluster.world_size, found.num_gpus)
    beside = beside_engine(row)
    return html.Details(
        [
            html.Summary(f"Where the numbers of {named} come from, and how sure they are"),
            html.H3("Time"),
            _table("Rates and their sources", RATES, rates(found)),
            *map(html.P, [*ranges(row), *on_top(row)]),
            html.H3("Memory"),
            *map(html.P, memory(row)),
            *([_table("Memory of the process and its sources", BESIDE, beside)] if beside else []),
            html.H3("Traffic"),
            *map(html.P, [LEGEND, *traffic(row)]),
        ],
        className="sources",
    )


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> html.Div:
    head = html.Tr([html.Th(column, scope="col") for column in columns])
    body = [html.Tr([html.Td(cell) for cell in cells]) for cells in rows]
    return scrolling(html.Table([html.Thead(head), html.Tbody(body)]), title)
