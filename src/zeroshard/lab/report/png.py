"""Draws a figure with matplotlib into a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from zeroshard.lab.report.figure import FAINT, LONGEST_NAME, LONGEST_TICK, Axis, Figure, Series, cut

WIDTH, HEIGHT, DPI = 8.0, 4.3, 110  # inches, dots an inch
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "X", "star": "*"}
# Inches, at the font size of tick labels; a plot is narrower than its figure by the y axis and its title.
PLOT_WIDTH, LETTER_WIDTH = 6.8, 0.085


def draw(figure: Figure, to: Path | BinaryIO) -> None:
    """Draw ``figure`` and write the PNG ``to`` a path or file.

    Math text is off, so that a ``$`` in a name is just a character.
    """
    with rc_context({"text.parse_math": False, "hatch.linewidth": 0.8, "font.size": 10}):
        canvas = Canvas(figsize=(WIDTH, HEIGHT * max(figure.height, 0.7)), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.add_subplot()
        for series in figure.series:
            _mark(axes, series)
        axes.grid(alpha=0.35)
        axes.set_axisbelow(True)
        _shape(axes, "x", figure.x)
        _shape(axes, "y", figure.y)
        if figure.x_range is not None:
            axes.set_xlim(*figure.x_range)
        axes.set_title(cut(figure.title, 90), fontsize="medium", loc="left")
        named = [series for series in figure.series if series.name]
        if len(named) > 1:
            longest = max(len(series.name) for series in named)
            columns = 1 if longest > 40 else 2 if longest > 20 else min(len(named), 4)
            canvas.legend(loc="outside lower center", ncols=columns, fontsize="small", frameon=False)
        canvas.savefig(to, dpi=DPI, format="png")


def _mark(axes: Any, series: Series) -> None:
    name, errors = cut(series.name, LONGEST_NAME) or "_hidden", series.errors
    if series.mark == "bar":
        style = {"hatch": "///", "edgecolor": "white"} if series.hatched else {"edgecolor": "#333333", "linewidth": 0.4}
        bottom = series.base or 0.0
        axes.bar(
            series.x,
            series.y,
            series.width,
            bottom=bottom,
            yerr=errors,
            capsize=2,
            color=series.colour,
            label=name,
            **style,
        )
        return
    line = {"line": "--" if series.dashed else "-", "points": ""}[series.mark]
    marker = _MARKERS.get(series.marker, "")
    axes.errorbar(
        series.x,
        series.y,
        errors,
        linestyle=line,
        marker=marker,
        markersize=6,
        color=series.colour,
        label=name,
        capsize=2,
        **({"alpha": FAINT, "linewidth": 0.8} if series.faint else {}),
    )
    hollow = [place for place, doubtful in enumerate(series.hollow) if doubtful]
    if hollow:
        x, y = [series.x[i] for i in hollow], [series.y[i] for i in hollow]
        axes.plot(x, y, linestyle="", marker=marker, markeredgecolor=series.colour, markerfacecolor="white", zorder=5)


def _shape(axes: Any, which: str, axis: Axis) -> None:
    own = getattr(axes, f"{which}axis")
    own.set_label_text(axis.title)
    if axis.log:
        getattr(axes, f"set_{which}scale")("log")
        low, high = own.get_view_interval()
        own.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)))
        own.set_minor_locator(NullLocator())
        own.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
    if axis.ticks:
        longest = LONGEST_TICK if len(axis.ticks) > 3 else 2 * LONGEST_TICK
        words = [cut(text, longest) for text in axis.ticks.values()]
        angle = slant(words) if which == "x" and not axis.log else 0
        own.set_ticks(list(axis.ticks), words, **({"rotation": angle, "ha": "right"} if angle else {}))
        if angle:
            for label in own.get_ticklabels():
                label.set_rotation_mode("anchor")  # the end of the word is at its tick, at any angle
    elif not axis.log:
        own.set_major_formatter(FuncFormatter(lambda value, place: f"{value:,.10g}"))
    if axis.from_zero and not axis.log:
        getattr(axes, f"set_{which}lim")(**{"bottom" if which == "y" else "left": 0})


def slant(words: Sequence[str]) -> int:
    """The angle in degrees, 0 or 25, at which labels under the plot do not overlap: there are 14 of them at most."""
    return 25 if max(map(len, words)) * LETTER_WIDTH > PLOT_WIDTH / len(words) else 0
