"""Converts a figure into plotly's format: plain data, which the page passes to plotly.js."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from zeroshard.lab.report.figure import FAINT, LONGEST_NAME, LONGEST_TICK, Axis, Figure, Series, cut

# Configuration of plotly.js. No button may send a figure to another server.
CONFIG = {"displaylogo": False, "modeBarButtonsToRemove": ["select2d", "lasso2d", "sendChartToCloud"]}
USUAL_HEIGHT = 400  # pixels
_SYMBOLS = {"triangle": "triangle-up", "cross": "x"}
_LEGEND_ROW = 21  # pixels
_TOOLBAR = 32  # pixels at the top for plotly's buttons, so that they cover nothing
_FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def as_plotly(figure: Figure) -> dict[str, Any]:
    """The figure as ``{"data", "layout"}``. All text is escaped, because plotly.js interprets tags in it."""
    num_named = sum(bool(series.name) for series in figure.series)
    longest = max((len(series.name) for series in figure.series), default=0)
    rows = num_named if longest > 24 else -(-num_named // 3)
    height = USUAL_HEIGHT * figure.height + rows * _LEGEND_ROW + _TOOLBAR
    x_axis = _axis(figure.x, [value for series in figure.series for value in series.x])
    if figure.x.ticks and not figure.x.log and max(map(len, figure.x.ticks.values())) > 8:
        x_axis["tickangle"] = -30
    if figure.x_range is not None:
        x_axis["range"] = list(figure.x_range)
    layout: dict[str, Any] = {
        "height": round(height),
        "margin": {"l": 10, "r": 14, "t": _TOOLBAR, "b": 10},
        "font": {"family": _FONT, "size": 13, "color": "#1a1a1a"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "barmode": "overlay",
        "hovermode": "closest",
        "showlegend": num_named > 1,
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0, "yanchor": "bottom"},
        "xaxis": x_axis,
        "yaxis": _axis(figure.y, [value for series in figure.series for value in series.y]),
    }
    return {"data": [_trace(series) for series in figure.series], "layout": layout}


def _axis(axis: Axis, values: Sequence[float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "title": {"text": _text(axis.title)},
        "automargin": True,
        "gridcolor": "#e3e3e3",
        "linecolor": "#555555",
        "zeroline": False,
        "ticks": "outside",
    }
    if axis.log:
        found["type"] = "log"
        ticks = _log_ticks(values)
        found |= {"tickmode": "array", "tickvals": ticks, "ticktext": [f"{tick:,.10g}" for tick in ticks]}
    if axis.ticks:
        longest = LONGEST_TICK if len(axis.ticks) > 3 else 2 * LONGEST_TICK
        found |= {
            "tickmode": "array",
            "tickvals": list(axis.ticks),
            "ticktext": [_text(cut(text, longest)) for text in axis.ticks.values()],
        }
    if axis.from_zero and not axis.log:
        found["rangemode"] = "tozero"
    return {key: value for key, value in found.items() if value is not None}


def _log_ticks(values: Sequence[float]) -> list[float]:
    """Ticks around ``values``: 1, 2 and 5 times powers of ten; over many decades the powers alone."""
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if not known:
        return []
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    steps: tuple[float, ...] = (1, 2, 5) if high - low <= 4 else (1,)
    if max(known) < 5 * min(known):
        steps = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)
    return [step * 10.0**power for power in range(low, high + 1) for step in steps]


def _trace(series: Series) -> dict[str, Any]:
    trace: dict[str, Any] = {
        "name": _text(cut(series.name, LONGEST_NAME)),
        "showlegend": bool(series.name),
        "x": list(series.x),
        "y": list(series.y),
        "text": [_text(note) for note in series.notes] or None,
        "hovertemplate": "%{text}<br>%{x:.4~g}, %{y:.4~g}" if series.notes else None,
    }
    if series.mark == "bar":
        pattern = {"shape": "/", "fgcolor": "white", "fillmode": "overlay", "size": 6} if series.hatched else None
        border = {"width": 0.5, "color": "#333333"}
        trace |= {"type": "bar", "marker": _present(color=series.colour, pattern=pattern, line=border)}
        trace |= {"base": list(series.base) or None, "width": series.width, "textposition": "none"}
        if series.notes:
            trace["hovertemplate"] = "%{text}<br>%{y:.4~g}"
    else:
        symbol = _SYMBOLS.get(series.marker, series.marker or "circle")
        symbols = [f"{symbol}-open" if hollow else symbol for hollow in series.hollow] or symbol
        mode = "markers" if series.mark == "points" else "lines+markers" if series.marker else "lines"
        trace |= {"type": "scatter", "mode": mode, "marker": {"symbol": symbols, "size": 9, "color": series.colour}}
        trace["line"] = {"color": series.colour, "width": 2, "dash": "dash" if series.dashed else "solid"}
        if series.faint:
            trace |= {"opacity": FAINT, "hoverinfo": "skip", "line": {"color": series.colour, "width": 1}}
    if series.errors is not None:
        below, above = series.errors
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": above,
            "arrayminus": below,
            "color": series.colour if series.mark != "bar" else "#333333",
            "thickness": 1.2,
        }
    return _present(**trace)


def _present(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _text(text: str) -> str:
    return html.escape(text, quote=False)
