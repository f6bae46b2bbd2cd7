"""Figures of speed: throughput, communication, and crossovers of strategies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

from zeroshard.lab.report.entries import OF_LINKS, Entry
from zeroshard.lab.report.figure import SKY, VERMILLION, Axis, Figure, Series, bandwidth_in_words
from zeroshard.lab.report.marks import (
    MOST_BARS,
    LeftOutError,
    alone,
    bandwidth_axis,
    bars,
    by_strategy,
    groups,
    lines,
    only_first,
    rank_of_strategy,
    titled,
)
from zeroshard.lab.run_folders import Spread, scaled

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
    """Communication time of a step on rank 0: total, and exposed (computation waited for it)."""
    entries = [entry for entry in entries if math.isfinite(entry.exposed_s) and entry.world_size != 1]
    if not entries:
        raise LeftOutError("no run of several ranks has ended well yet")
    has_total = any(math.isfinite(entry.total_comm_s) for entry in entries)
    caption = "Exposed: computation waited for it. "
    caption += "Total: it was under way, hidden or not." if has_total else "--profile.overlap records the total too."
    y = Axis("ms of a step, rank 0", log=True)
    figures = []
    for name, group in groups(entries, bandwidth, OF_LINKS):
        exposed = lines(group, bandwidth, lambda e: scaled(e.case.exposed_s, 1e3), suffix=" exposed")
        total = lines(group, bandwidth, lambda e: alone(e.total_comm_s * 1e3), suffix=" total", dashed=True)
        figure = titled(
            "communication", "Communication against bandwidth", name, bandwidth_axis(group), y, [*exposed, *total]
        )
        figures.append(replace(figure, caption=caption))
    if not figures:
        shown = sorted(entries, key=rank_of_strategy)[:MOST_BARS]
        places = tuple(map(float, range(len(shown))))
        exposed_ms = tuple(entry.exposed_s * 1e3 for entry in shown)
        hidden_ms = tuple(max(entry.total_comm_s - entry.exposed_s, 0.0) * 1e3 for entry in shown)
        spreads = [entry.case.exposed_s for entry in shown]
        low, high = (tuple(1e3 * (getattr(each, end) if each else math.nan) for each in spreads) for end in ENDS)
        shown_bars = [Series("exposed", "bar", VERMILLION, places, exposed_ms, low, high)]
        if has_total:
            shown_bars.append(Series("hidden", "bar", SKY, places, hidden_ms, base=exposed_ms))
        x = Axis("", ticks={float(i): entry.label for i, entry in enumerate(shown)})
        figures.append(
            Figure(
                "communication",
                "Communication",
                x,
                Axis("ms of a step, rank 0", from_zero=True),
                tuple(shown_bars),
                only_first(shown, entries, caption),
            )
        )
    return figures


def relative(entries: Sequence[Entry]) -> list[Figure]:
    """Step times divided by the first strategy's, by bandwidth; a line at 1 is as fast as the first strategy."""
    figures = []
    entries = [entry for entry in entries if entry.case.step_s]
    for name, group in groups(entries, bandwidth, OF_LINKS):
        found_by_strategy = by_strategy(group)
        if len(found_by_strategy) < 2:
            continue
        first, *_ = found_by_strategy
        reference = {bandwidth(entry): entry.case.step_s for entry in found_by_strategy[first]}

        def ratio(entry: Entry, reference: Mapping[float, Spread | None] = reference) -> Spread | None:
            own, other = entry.case.step_s, reference.get(bandwidth(entry))
            return Spread(own.median / other.median, own.low / other.median, own.high / other.median, own.count) if (
                own and other
            ) else None  # fmt: skip

        series = lines(group, bandwidth, ratio)
        y = Axis(f"step time / that of {first}", log=True)
        figure = titled("relative", "Which strategy wins", name, bandwidth_axis(group), y, series)
        caption = f"Below 1: faster than {first}. {_winners(group)}{_draws(series, first)}"
        figures.append(replace(figure, caption=caption))
    if not figures:
        raise LeftOutError("needs two strategies at two bandwidths")
    return figures


def _winners(group: Sequence[Entry]) -> str:
    words = []
    for rate in sorted({bandwidth(entry) for entry in group}):
        here = [entry for entry in group if bandwidth(entry) == rate]
        best = min(here, key=lambda entry: entry.case.step_s.median if entry.case.step_s else math.inf)
        words.append(f"{best.strategy} at {bandwidth_in_words(rate)}")
    return f"Fastest: {', '.join(words)}."


def _draws(series: Sequence[Series], first: str) -> str:
    """The bandwidths at which lines cross 1, in words; interpolated linearly on logarithmic scales."""
    found = []
    for line in series[1:]:
        for x0, x1, y0, y1 in zip(line.x, line.x[1:], line.y, line.y[1:], strict=False):
            if (y0 - 1) * (y1 - 1) < 0:
                share = math.log(y0) / (math.log(y0) - math.log(y1))
                at = math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
                found.append(f"{line.name} draws with {first} near {bandwidth_in_words(at)}")
    return f" {'; '.join(found)}." if found else ""
