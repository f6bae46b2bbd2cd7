"""Turns entries into lines and bars: their colours, their order, and the grouping of entries into figures."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from zeroshard.lab.report.entries import STRATEGIES, Entry
from zeroshard.lab.report.figure import (
    BLACK,
    BLUE,
    CYCLE,
    GREEN,
    MARKERS,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Axis,
    Figure,
    Series,
    bandwidth_in_words,
)
from zeroshard.lab.run_folders import Spread

MOST_GROUPS = 4  # most figures of one kind: one for each combination of the settings that are on no axis
MOST_BARS = 14
_STYLES = {
    name: (colour, marker)
    for name, colour, marker in zip(
        STRATEGIES,
        (BLACK, ORANGE, SKY, GREEN, VERMILLION, PURPLE, BLUE),
        ("circle", "square", "diamond", "triangle", "cross", "star", "circle"),
        strict=True,
    )
}


class LeftOutError(Exception):
    """A figure is left out because there are no data for it; the message says which data it needs."""


def groups(
    entries: Iterable[Entry], x_of: Callable[[Entry], float], on_axis: Sequence[str]
) -> list[tuple[str, list[Entry]]]:
    """Group entries that differ only in strategy and in the settings on the x axis; returns (other settings, entries).

    Groups with fewer than two positions on the axis are left out, and only the first `MOST_GROUPS` are returned.

    Args:
        x_of: position of an entry on the x axis; entries with a position that is not finite are left out.
        on_axis: names of the settings that the x axis shows.
    """
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if math.isfinite(x_of(entry)):
            found[entry.rest("strategy", *on_axis)].append(entry)
    wide = [(name, group) for name, group in found.items() if len({x_of(entry) for entry in group}) > 1]
    return wide[:MOST_GROUPS]


def by_strategy(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by strategy, in the order of `STRATEGIES`."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=rank_of_strategy):
        found.setdefault(entry.strategy, []).append(entry)
    return found


def lines(
    group: Iterable[Entry],
    x_of: Callable[[Entry], float],
    value: Callable[[Entry], Spread | None],
) -> list[Series]:
    """One line for each strategy, with error bars from the lowest to the highest repeat."""
    series = []
    for index, (strategy, entries) in enumerate(by_strategy(group).items()):
        points = [(x_of(entry), found, entry) for entry in entries if (found := value(entry)) is not None]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        colour, marker = style(strategy, index)
        series.append(
            Series(
                strategy or "runs",
                "line",
                colour,
                tuple(x for x, _, _ in points),
                tuple(found.median for _, found, _ in points),
                tuple(found.low for _, found, _ in points),
                tuple(found.high for _, found, _ in points),
                marker=marker,
                hollow=tuple(not entry.is_comparable for _, _, entry in points),
                notes=tuple(count_in_words(found) for _, found, _ in points),
            )
        )
    return series


def bars(name: str, title: str, entries: list[Entry], y: Axis, value: Callable[[Entry], Spread | None]) -> Figure:
    """A figure with a bar for each of the first `MOST_BARS` entries, in the colour of its strategy."""
    shown = sorted(entries, key=rank_of_strategy)[:MOST_BARS]
    series = []
    for strategy, group in by_strategy(shown).items():
        found = [(float(shown.index(entry)), spread) for entry in group if (spread := value(entry)) is not None]
        series.append(
            Series(
                strategy or "runs",
                "bar",
                style(strategy, 0)[0],
                tuple(place for place, _ in found),
                tuple(spread.median for _, spread in found),
                tuple(spread.low for _, spread in found),
                tuple(spread.high for _, spread in found),
                width=0.6,
                notes=tuple(count_in_words(spread) for _, spread in found),
            )
        )
    x = Axis("", ticks={float(index): entry.label for index, entry in enumerate(shown)})
    return Figure(name, title, x, y, tuple(series), only_first(shown, entries, ""))


def titled(name: str, title: str, group: str, x: Axis, y: Axis, series: Sequence[Series]) -> Figure:
    """A figure of one group, whose name is added to the title."""
    return Figure(name, f"{title}: {group}" if group else title, x, y, tuple(series))


def numbered(figures: Sequence[Figure]) -> list[Figure]:
    """Add a number to the name of each figure whose name was used before, so that file names are unique."""
    seen: defaultdict[str, int] = defaultdict(int)
    found = []
    for figure in figures:
        seen[figure.name] += 1
        number = seen[figure.name]
        found.append(replace(figure, name=f"{figure.name}-{number}") if number > 1 else figure)
    return found


def only_first(shown: Sequence[Entry], entries: Sequence[Entry], caption: str) -> str:
    """``caption``, followed by the number of entries that are shown if not all are."""
    if len(shown) == len(entries):
        return caption.strip()
    return f"{caption} The first {len(shown)} of {len(entries)}; the table has all.".strip()


def bandwidth_axis(group: Iterable[Entry]) -> Axis:
    """A bandwidth axis whose ticks are the requested bandwidths of the entries."""
    return Axis("bandwidth of a link", log=True, ticks=bandwidth_ticks(entry.bytes_per_s for entry in group))


def bandwidth_ticks(rates: Iterable[float]) -> dict[float, str]:
    """Labels by bandwidth for up to eight of ``rates``, so that the labels do not overlap."""
    known = sorted(set(rates))
    return {rate: bandwidth_in_words(rate) for rate in known[:: -(-len(known) // 8)]}


def rank_of_strategy(entry: Entry) -> int:
    """The sort key of an entry: its strategy's index in `STRATEGIES`."""
    return STRATEGIES.index(entry.strategy) if entry.strategy in STRATEGIES else len(STRATEGIES)


def style(strategy: str, index: int) -> tuple[str, str]:
    """Colour and marker of a strategy, the same in every figure; for an unknown strategy ``index`` chooses them."""
    return _STYLES.get(strategy, (CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]))


def count_in_words(found: Spread) -> str:
    """Format the number of runs behind a mark: ``3 runs``."""
    return f"{found.count} runs" if found.count > 1 else "1 run"
