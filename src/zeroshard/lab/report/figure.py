"""A figure as data: axes with their units, and marks. `interactive` and `png` draw the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from types import MappingProxyType
from typing import Literal

from zeroshard.settings import sizes

# Okabe and Ito (2008), "Color Universal Design", https://jfly.uni-koeln.de/color/: safe for colour-blind readers.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#999999"
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, BLACK, YELLOW)
MARKERS = ("circle", "square", "diamond", "triangle", "cross", "star")
SET_MARKERS = ("diamond", "square", "triangle", "cross", "star", "circle")  # of validation sets; first the run's own
FAINT = 0.35  # opacity of a faint line
LONGEST_TICK, LONGEST_NAME = 28, 60  # most characters of a tick label, and of a name in the legend
Mark = Literal["line", "points", "bar"]


@dataclass(frozen=True)
class Axis:
    """One axis."""

    title: str  # text beside the axis, with the unit
    log: bool = False  # whether its scale is logarithmic
    # tick labels by position; empty: numbers at positions that the drawing library chooses
    ticks: Mapping[float, str] = field(default_factory=lambda: MappingProxyType({}))
    from_zero: bool = False  # whether it begins at 0, so that lengths can be compared


@dataclass(frozen=True)
class Series:
    """Marks that share a colour and a name."""

    name: str  # name in the legend; empty: the legend leaves it out
    mark: Mark  # ``line``: joined points; ``points``; ``bar``: a vertical bar at ``x``, ``y`` high from ``base``
    colour: str  # colour as ``#rrggbb``
    # x, y: coordinates; of bars y is a height
    x: tuple[float, ...]
    y: tuple[float, ...]
    # low, high: ends of the error bars along y; empty: no error bars
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    base: tuple[float, ...] = ()  # the beginning of each bar; empty: all begin at 0
    width: float = 0.8  # thickness of a bar, in units of its axis
    marker: str = ""  # one of `MARKERS`; empty: a line without markers
    dashed: bool = False  # whether a line is dashed
    hatched: bool = False  # whether bars are hatched
    faint: bool = False  # whether a line is pale and thin, behind others: what was measured, below its smoothed course
    # whether each point is drawn hollow, because it is not comparable with others; empty: none is
    hollow: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()  # text that the page shows for each mark under the pointer

    @property
    def errors(self) -> tuple[list[float], list[float]] | None:
        """Lengths of the error bars below and above each mark; None if all are 0."""
        if all(low == high for low, high in zip(self.low, self.high, strict=True)):
            return None
        below = [y - low for low, y in zip(self.low, self.y, strict=True)]
        return below, [high - y for high, y in zip(self.high, self.y, strict=True)]


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # name of its file, without the ending
    title: str  # what it shows, in a line
    # x, y: its axes
    x: Axis
    y: Axis
    series: tuple[Series, ...]  # its marks, in the order of the legend
    caption: str = ""  # how to read it
    height: float = 1.0  # height of the plot, as a multiple of the usual height
    # whether its lines are values by step, which the page can smooth and put on a logarithmic scale
    curves: bool = False

    @property
    def x_range(self) -> tuple[float, float] | None:
        """The interval on x of a bar chart, wide enough that a few bars do not fill the figure; None without bars."""
        if not any(series.mark == "bar" for series in self.series):
            return None
        room = 0.6 + max(0.0, (4 - len(self.x.ticks)) / 2)
        return -room, len(self.x.ticks) - 1 + room

    @property
    def hollow(self) -> bool:
        """Whether any of its points is hollow, that is, not comparable with others."""
        return any(any(series.hollow) for series in self.series)


def cut(text: str, longest: int) -> str:
    """``text`` with at most ``longest`` characters, of which the last is an ellipsis if some are left out."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def bandwidth_in_words(bytes_per_s: float) -> str:
    """Format a bandwidth: ``100 Mbit/s``, ``2.5 Gbit/s``; infinity is ``unshaped``, NaN ``unknown``."""
    if not isfinite(bytes_per_s):
        return "unknown" if isnan(bytes_per_s) else "unshaped"
    return sizes.bandwidth_in_words(bytes_per_s)
