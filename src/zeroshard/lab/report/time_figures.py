"""The time to a loss: figures of loss against seconds, loss against bytes and time to the target, and a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from zeroshard.lab.report.entries import words_of
from zeroshard.lab.report.figure import CYCLE, GREY, MARKERS, Axis, Figure, Series, bandwidth_in_words
from zeroshard.lab.report.marks import MOST_GROUPS, LeftOutError, bandwidth_ticks, count_in_words, numbered
from zeroshard.lab.report.table import Table, between
from zeroshard.lab.run_folders import Spread, scaled
from zeroshard.lab.sweep.cases import REMEDY
from zeroshard.lab.sweep.time_to_loss import Timed, TimesToLoss, first_of
from zeroshard.train.config.sizes import parse_bandwidth

_BANDWIDTH = "link.bandwidth"
_HOW = "Seconds are steps x the measured time of a step: no link was trained over to the end."
_BYTES = "Bytes that rank 0 gave to collectives, an all-reduce counted twice; inside a node too."
_TITLES = ("remedy", "strategy", "link", "step, ms", "MB a step", "steps to the target", "s to the target")


def time_figures(all_times: Iterable[TimesToLoss]) -> list[Figure]:
    """All figures of sweeps that asked for times to a loss.

    Raises:
        LeftOutError: there is no such sweep, or the run whose curve sets the target did not end successfully.
    """
    figures: list[Figure] = []
    whys = []
    for times in all_times:
        if math.isnan(times.target):
            whys.append(f"no target: {times.why}")
            continue
        figures += [*_to_target(times), *_against_seconds(times), *_against_bytes(times)]
    if not figures:
        raise LeftOutError("; ".join(whys) or "needs a sweep with --time-to-loss")
    return numbered(figures)


def time_table(times: TimesToLoss) -> Table:
    """A row for each remedy, stage and link."""
    rows = []
    for row in times.rows:
        first = first_of(times, row)
        seconds = row.seconds
        base = first.seconds if first else None
        rows.append(
            (
                row.remedy or words_of(row.case.axes),
                str(row.case.axes.get("strategy", "")),
                bandwidth_in_words(bandwidth_of(row)),
                between(row.case.step_s, 1e3, ",.1f"),
                f"{row.bytes_per_step / 1e6:,.3f}" if math.isfinite(row.bytes_per_step) else "not counted",
                f"{row.steps:,}" if row.steps is not None else row.fate,
                between(seconds, 1.0, ",.1f") or "-",
                f"{base.median / seconds.median:.2f}" if base and seconds and seconds.median else "-",
            )
        )
    titles = (*_TITLES, f"times as fast as {times.first or 'the first'}")
    return Table(titles, tuple(rows), f"Target: a validation loss of {times.target:.4f}, {times.why}. {_HOW}")


def bandwidth_of(row: Timed) -> float:
    """The bandwidth of a row's link in bytes per second; infinite if it was not throttled."""
    asked = row.case.axes.get(_BANDWIDTH) or next((run.setting(_BANDWIDTH, "") for run in row.case.done), "")
    return parse_bandwidth(_BANDWIDTH, str(asked)) if asked else math.inf


def _to_target(times: TimesToLoss) -> list[Figure]:
    """Time to the target by bandwidth, a line per remedy; dashed: never reached, so the time of all steps is shown."""
    figures = []
    for name, rows in _groups(times.rows, _BANDWIDTH).items():
        rates = [bandwidth_of(row) for row in rows]
        if len({rate for rate in rates if math.isfinite(rate)}) < 2:
            continue
        series = []
        for index, (remedy, mine) in enumerate(_by_remedy(rows).items()):
            points = [(bandwidth_of(row), found, row) for row in mine if (found := _seconds_or_more(row)) is not None]
            points = sorted((p for p in points if math.isfinite(p[0])), key=lambda point: point[0])
            if not points:
                continue
            never = points[0][2].steps is None
            series.append(
                Series(
                    f"{remedy}: {points[0][2].fate}" if never else remedy,
                    "line",
                    CYCLE[index % len(CYCLE)],
                    tuple(x for x, _, _ in points),
                    tuple(found.median for _, found, _ in points),
                    tuple(found.low for _, found, _ in points),
                    tuple(found.high for _, found, _ in points),
                    marker=MARKERS[index % len(MARKERS)],
                    dashed=never,
                    notes=tuple(f"{row.fate}, {count_in_words(found)}" for _, found, row in points),
                )
            )
        caption = f"Target: a validation loss of {times.target:.4f}, {times.why}. {_HOW}"
        if any(line.dashed for line in series):
            caption += " Dashed: never reached; what all its steps take, and it would take longer."
        x = Axis("bandwidth of a link", log=True, ticks=bandwidth_ticks(rate for rate in rates if math.isfinite(rate)))
        figures.append(
            Figure("time-to-loss", _titled("Time to a loss", name), x, Axis("s", log=True), tuple(series), caption)
        )
    return figures[:MOST_GROUPS]


def _against_seconds(times: TimesToLoss) -> list[Figure]:
    groups = _groups(times.rows)
    step = -(-len(groups) // MOST_GROUPS)
    chosen = list(groups.items())[::step]
    more = f" {len(chosen)} of {len(groups)} combinations are drawn; the table has all." if step > 1 else ""
    figures = []
    for name, rows in chosen:
        series = _curves(rows, times.target, lambda row: row.case.step_s.median if row.case.step_s else math.nan)
        title = _titled("Loss against time", name)
        axes = Axis("s", log=True), Axis("nats per token, validation", log=True)
        figures.append(Figure("loss-by-seconds", title, *axes, series, _HOW + more, height=1.15))
    return figures


def _against_bytes(times: TimesToLoss) -> list[Figure]:
    """Loss against bytes, drawn once for all links, because bytes do not depend on the bandwidth."""
    figures = []
    for name, rows in _groups(times.rows, _BANDWIDTH).items():
        once = [mine[0] for mine in _by_remedy(rows).values() if mine[0].bytes_per_step > 0]
        if once:
            series = _curves(once, times.target, lambda row: row.bytes_per_step / 1e6)
            title = _titled("Loss against bytes", name)
            axes = Axis("MB", log=True), Axis("nats per token, validation", log=True)
            figures.append(Figure("loss-by-bytes", title, *axes, series, _BYTES, height=1.15))
    return figures[:MOST_GROUPS]


def _curves(rows: Sequence[Timed], target: float, per_step: Callable[[Timed], float]) -> tuple[Series, ...]:
    """Validation loss of each row against its steps times ``per_step``, and the target as a horizontal line."""
    series = []
    for index, row in enumerate(rows):
        scale = per_step(row)
        if not row.losses or not math.isfinite(scale):
            continue
        x, y = zip(*((step * scale, loss) for step, loss in row.losses), strict=True)
        name = row.remedy or words_of(row.case.axes)
        never = f": {row.fate}" if row.steps is None else ""
        dashed = index >= len(CYCLE)
        series.append(Series(f"{name}{never}", "line", CYCLE[index % len(CYCLE)], x, y, dashed=dashed))
    if series:
        ends = min(min(line.x) for line in series), max(max(line.x) for line in series)
        series.append(Series(f"target {target:.4f}", "line", GREY, ends, (target, target), dashed=True))
    return tuple(series)


def _seconds_or_more(row: Timed) -> Spread | None:
    """Seconds to the target; if the curve never reached it, seconds of all its steps."""
    return row.seconds or (scaled(row.case.step_s, row.num_steps) if row.losses else None)


def _groups(rows: Iterable[Timed], *without: str) -> dict[str, list[Timed]]:
    """Group rows that differ only in the remedy and in ``without``; a group's key is its common settings in words."""
    found: dict[str, list[Timed]] = {}
    for row in rows:
        common = {name: value for name, value in row.case.axes.items() if name not in (REMEDY, *without)}
        found.setdefault(words_of(common), []).append(row)
    return found


def _by_remedy(rows: Iterable[Timed]) -> dict[str, list[Timed]]:
    found: dict[str, list[Timed]] = {}
    for row in rows:
        found.setdefault(row.remedy or "runs", []).append(row)
    return found


def _titled(title: str, group: str) -> str:
    return f"{title}: {group}" if group else title
