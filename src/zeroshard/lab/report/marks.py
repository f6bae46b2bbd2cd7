"""Entries as lines and bars: their colours, their order, and which of them belong into one figure."""

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
    GREY,
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

MOST_GROUPS = 4  # figures of one kind, for combinations of what is on no axis
MOST_BARS = 14
_STYLES = {
    name: (colour, marker)
    for name, colour, marker in zip(
        STRATEGIES,
        (BLACK, ORANGE, SKY, GREEN, VERMILLION, PURPLE, BLUE, GREY),
        ("circle", "square", "diamond", "triangle", "cross", "star", "circle", "square"),
        strict=True,
    )
}


class LeftOutError(Exception):
    """There are no data for a figure; says which would be needed."""


def groups(
    entries: Iterable[Entry], x_of: Callable[[Entry], float], on_axis: Sequence[str]
) -> list[tuple[str, list[Entry]]]:
    """Entries that differ in strategy and on the axis alone, with the words of what else sets them apart; only such as
    have two places on the axis, and not more than a reader can take in.
    """
    found: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if math.isfinite(x_of(entry)):
            found[entry.rest("strategy", *on_axis)].append(entry)
    wide = [(name, group) for name, group in found.items() if len({x_of(entry) for entry in group}) > 1]
    return wide[:MOST_GROUPS]


def by_strategy(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Entries under their strategies, in the order of `STRATEGIES`."""
    found: dict[str, list[Entry]] = {}
    for entry in sorted(entries, key=rank_of_strategy):
        found.setdefault(entry.strategy, []).append(entry)
    return found


def lines(
    group: Iterable[Entry],
    x_of: Callable[[Entry], float],
    value: Callable[[Entry], Spread | None],
    *,
    suffix: str = "",
    dashed: bool = False,
) -> list[Series]:
    """One line for each strategy, with whiskers from the lowest to the highest of its repeats."""
    series = []
    for index, (strategy, entries) in enumerate(by_strategy(group).items()):
        points = [(x_of(entry), found, entry) for entry in entries if (found := value(entry)) is not None]
        points.sort(key=lambda point: point[0])
        if not points:
            continue
        colour, marker = style(strategy, index)
        series.append(
            Series(
                f"{strategy or 'runs'}{suffix}",
                "line",
                colour,
                tuple(x for x, _, _ in points),
                tuple(found.median for _, found, _ in points),
                tuple(found.low for _, found, _ in points),
                tuple(found.high for _, found, _ in points),
                marker=marker,
                dashed=dashed,
                hollow=tuple(not entry.is_comparable for _, _, entry in points),
                notes=tuple(count_in_words(found) for _, found, _ in points),
            )
        )
    return series


def bars(name: str, title: str, entries: list[Entry], y: Axis, value: Callable[[Entry], Spread | None]) -> Figure:
    """A bar for each of the first entries, in the colour of its strategy."""
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
    """A figure of one group, which its title names."""
    return Figure(name, f"{title}: {group}" if group else title, x, y, tuple(series))


def numbered(figures: Sequence[Figure]) -> list[Figure]:
    """Names of files are told apart by a number."""
    seen: defaultdict[str, int] = defaultdict(int)
    found = []
    for figure in figures:
        seen[figure.name] += 1
        number = seen[figure.name]
        found.append(replace(figure, name=f"{figure.name}-{number}") if number > 1 else figure)
    return found


def only_first(shown: Sequence[Entry], entries: Sequence[Entry], caption: str) -> str:
    """``caption``, and how many of ``entries`` are shown where not all are."""
    if len(shown) == len(entries):
        return caption.strip()
    return f"{caption} The first {len(shown)} of {len(entries)}; the table has all.".strip()


def bandwidth(entry: Entry) -> float:
    """Place on the axis of bandwidths, in bytes per second."""
    return entry.bytes_per_s


def bandwidth_axis(group: Iterable[Entry]) -> Axis:
    """With the bandwidths that were asked for as its ticks."""
    return Axis("bandwidth of a link", log=True, ticks=bandwidth_ticks(bandwidth(entry) for entry in group))


def bandwidth_ticks(rates: Iterable[float]) -> dict[float, str]:
    """Up to eight of them, so that words do not lie on each other."""
    known = sorted(set(rates))
    step = -(-len(known) // 8)
    return {rate: bandwidth_in_words(rate) for rate in known[::step]}


def rank_of_strategy(entry: Entry) -> int:
    """By which entries are sorted."""
    return STRATEGIES.index(entry.strategy) if entry.strategy in STRATEGIES else len(STRATEGIES)


def style(strategy: str, index: int) -> tuple[str, str]:
    """Colour and marker: a strategy has the same ones in every figure; ``index`` chooses for others."""
    return _STYLES.get(strategy, (CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]))


def count_in_words(found: Spread) -> str:
    """How many runs a mark stands for."""
    return f"{found.count} runs" if found.count > 1 else "1 run"


def alone(value: float) -> Spread | None:
    """One value as a spread; None where it is not known."""
    return Spread(value, value, value, 1) if math.isfinite(value) else None
