"""A figure as data: axes with their units, and marks. `interactive` and `png` draw the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from types import MappingProxyType
from typing import Literal

# Okabe and Ito (2008), "Color Universal Design", https://jfly.uni-koeln.de/color/: told apart by all kinds of eyes.
BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILLION, PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#999999"
CYCLE = (BLUE, ORANGE, GREEN, VERMILLION, SKY, PURPLE, BLACK, YELLOW)
MARKERS = ("circle", "square", "diamond", "triangle", "cross", "star")
SET_MARKERS = ("diamond", "square", "triangle", "cross", "star", "circle")  # of validation sets; the first: the run's
Mark = Literal["line", "points", "bar", "span"]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Attributes:
        title: with the unit.
        log: whether its scale is logarithmic.
        ticks: words by place, where numbers are not what a reader wants.
        reversed: whether it begins at the top.
        from_zero: whether 0 is on it, so that lengths can be compared.
    """

    title: str
    log: bool = False
    ticks: Mapping[float, str] = field(default_factory=lambda: MappingProxyType({}))
    reversed: bool = False
    from_zero: bool = False


@dataclass(frozen=True)
class Series:
    """Marks of one colour and name.

    Attributes:
        name: in the legend; empty: not there.
        mark: ``line``: points joined; ``points``; ``bar``: upright, ``y`` high from ``base``; ``span``: lying, ``x``
            long from ``base``, at ``y``.
        colour: as ``#rrggbb``.
        x, y: places.
        low, high: whiskers of y; empty: none.
        base: where bars and spans begin; empty: at 0.
        width: across a bar or a span.
        marker: of `MARKERS`; empty: a line without.
        marker_size: in pixels.
        dashed: of a line.
        hatched: of bars.
        hollow: which points are not to be compared with others; empty: none.
        notes: more about each mark, on the page.
    """

    name: str
    mark: Mark
    colour: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    base: tuple[float, ...] = ()
    width: float = 0.8
    marker: str = ""
    marker_size: float = 9.0
    dashed: bool = False
    hatched: bool = False
    hollow: tuple[bool, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: of its file.
        title: what it shows, in a line.
        x, y: axes.
        series: in the order of the legend.
        caption: how to read it.
        band: from and to, on x, that is shaded.
        height: of its plot, as a share of the usual.
        curves: whether its lines are values by step, which the page can smooth and put on a logarithmic scale.
    """

    name: str
    title: str
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    caption: str = ""
    band: tuple[float, float] | None = None
    height: float = 1.0
    curves: bool = False

    @property
    def x_range(self) -> tuple[float, float] | None:
        """From and to, where bars stand side by side: a few of them do not fill the figure. None: as the values are."""
        if not any(series.mark == "bar" for series in self.series):
            return None
        room = 0.6 + max(0.0, (4 - len(self.x.ticks)) / 2)
        return -room, len(self.x.ticks) - 1 + room

    @property
    def hollow(self) -> bool:
        """Whether any of its points is not to be compared."""
        return any(any(series.hollow) for series in self.series)


def bandwidth_in_words(bytes_per_s: float) -> str:
    """``100 Mbit/s``, ``2.5 Gbit/s``; without a limit: ``unshaped``; of NaN: ``unknown``."""
    if not isfinite(bytes_per_s):
        return "unknown" if isnan(bytes_per_s) else "unshaped"
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.3g} Mbit/s"
