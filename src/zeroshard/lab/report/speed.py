"""Figures of speed: throughput and exposed communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from zeroshard.lab.report.entries import OF_LINKS, Entry
from zeroshard.lab.report.figure import VERMILLION, Axis, Figure, Series
from zeroshard.lab.report.marks import (
    MOST_BARS,
    LeftOutError,
    bandwidth_axis,
    bars,
    groups,
    lines,
    only_first,
    rank_of_strategy,
    titled,
)
from zeroshard.lab.run_folders import scaled

bandwidth = attrgetter("bytes_per_s")  # of an entry: its place on the bandwidth axis
ENDS = ("low", "high")  # attributes of a `Spread`: the ends of error bars


def throughput(entries: Sequence[Entry]) -> list[Figure]:
    """Tokens per second against bandwidth, and per rank against ranks; if neither varies, a bar per configuration."""
    entries = [entry for entry in entries if entry.case.tokens_per_s]
    if not entries:
        raise LeftOutError("no run has ended well yet")
    figures = []
    for name, group in groups(entries, bandwidth, OF_LINKS):
        series = lines(group, bandwidth, lambda entry: entry.case.tokens_per_s)
        y = Axis("tokens/s, all ranks", log=True)
        figures.append(titled("throughput", "Throughput against bandwidth", name, bandwidth_axis(group), y, series))
    for name, group in groups(entries, lambda entry: entry.world_size or math.nan, ("nproc",)):
        series = lines(
            group, lambda entry: entry.world_size, lambda e: scaled(e.case.tokens_per_s, 1 / max(e.world_size, 1))
        )
        ranks = sorted({entry.world_size for entry in group})
        x = Axis("ranks", log=True, ticks={rank: str(rank) for rank in ranks})
        figures.append(
            titled("scaling", "Throughput of a rank", name, x, Axis("tokens/s and rank", from_zero=True), series)
        )
    if not figures:
        figures.append(
            bars(
                "throughput",
                "Throughput",
                entries,
                Axis("tokens/s, all ranks", from_zero=True),
                lambda e: e.case.tokens_per_s,
            )
        )
    return figures


def communication(entries: Sequence[Entry]) -> list[Figure]:
    """Exposed communication of a step on rank 0: the time for which computation waited."""
    entries = [entry for entry in entries if math.isfinite(entry.exposed_s) and entry.world_size != 1]
    if not entries:
        raise LeftOutError("no run of several ranks has ended well yet")
    caption = "Exposed: computation waited for it."
    y = Axis("ms of a step, rank 0", log=True)
    figures = []
    for name, group in groups(entries, bandwidth, OF_LINKS):
        exposed = lines(group, bandwidth, lambda e: scaled(e.case.exposed_s, 1e3))
        title = "Exposed communication against bandwidth"
        figure = titled("communication", title, name, bandwidth_axis(group), y, exposed)
        figures.append(replace(figure, caption=caption))
    if not figures:
        shown = sorted(entries, key=rank_of_strategy)[:MOST_BARS]
        places = tuple(map(float, range(len(shown))))
        exposed_ms = tuple(entry.exposed_s * 1e3 for entry in shown)
        spreads = [entry.case.exposed_s for entry in shown]
        low, high = (tuple(1e3 * (getattr(each, end) if each else math.nan) for each in spreads) for end in ENDS)
        shown_bars = [Series("exposed", "bar", VERMILLION, places, exposed_ms, low, high)]
        x = Axis("", ticks={float(i): entry.label for i, entry in enumerate(shown)})
        figures.append(
            Figure(
                "communication",
                "Exposed communication",
                x,
                Axis("ms of a step, rank 0", from_zero=True),
                tuple(shown_bars),
                only_first(shown, entries, caption),
            )
        )
    return figures
