"""Figures of single runs: loss, memory, and predicted against measured."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from zeroshard.lab.metrics_log import NAMED
from zeroshard.lab.planner.show import size
from zeroshard.lab.report.entries import OF_LINKS, Entry, pair_of, plan_of
from zeroshard.lab.report.figure import (
    BLACK,
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SET_MARKERS,
    SKY,
    VERMILLION,
    YELLOW,
    Axis,
    Figure,
    Series,
)
from zeroshard.lab.report.marks import MOST_BARS, LeftOutError, only_first, rank_of_strategy, style
from zeroshard.lab.run_folders import RunResult
from zeroshard.train.records.records import in_memory, is_on_disk

MOST_LINES = 12
MOST_SETTINGS = 3  # in which a run differs, in the name of its curve
SMOOTHED_FROM, SMOOTHED_OVER = 60, 30  # points; of N points N / 30 on each side count
MOST_NAMED = 6  # most runs with identical losses that the caption names for one curve
MOST_POINTS = 400  # most points of a curve
MIB, GIB = 2**20, 2**30
CATEGORY_COLOURS = {
    "params": BLUE,
    "grads": ORANGE,
    "master": SKY,
    "optimizer": GREEN,
    "ema": PURPLE,
    "unit_buffers": YELLOW,
    "prefetch": "#F8F8F8",
    "activations": VERMILLION,
    "temporaries": "#8C510A",
    "comm_buffers": BLACK,
    "others": GREY,
    # on the host, where state was sent: paler
    "host_params": "#8FC1E0",
    "host_grads": "#F5D08A",
    "host_master": "#CFE8F7",
    "host_optimizer": "#8AD3BC",
    "host_slots": "#D4D4D4",
    "host_inputs": "#EFB08C",
}


def loss(entries: Sequence[Entry]) -> list[Figure]:
    """Loss by step, smoothed, with what was measured behind it, and the validation losses.

    The first curve of a strategy has its colour. Bit-identical curves are drawn once; the caption names them.
    """
    curves: dict[tuple[tuple[int, float], ...], list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=rank_of_strategy):
        run = entry.first
        if run is not None and run.steps:
            curves[tuple((step.step, step.loss) for step in run.steps)].append(entry)
    if not curves:
        raise LeftOutError("no run has taken a step")
    series: list[Series] = []
    drawn_in: defaultdict[str, int] = defaultdict(int)  # curves by colour
    for index, (points, group) in enumerate(list(curves.items())[:MOST_LINES]):
        colour = style(group[0].strategy, index)[0]
        if drawn_in[colour]:
            colour = min(CYCLE, key=drawn_in.__getitem__)
        dashed = drawn_in[colour] % 2 == 1
        drawn_in[colour] += 1
        name = _name_of(group[0])
        if len(points) >= SMOOTHED_FROM:
            series.append(_line("", colour, points, faint=True))
        series.append(_line(name, colour, smoothed(points), dashed=dashed))
        run = group[0].first
        if run is not None and run.evaluations and len(curves) <= MOST_LINES // 2:
            series += _evaluations(name, run, colour if len(curves) > 1 else VERMILLION)
    caption = f"{len(curves) - MOST_LINES} more curves are not drawn. " if len(curves) > MOST_LINES else ""
    caption += " ".join(_equal_to(group) for group in curves.values() if len(group) > 1)
    return [Figure("loss", "Loss", Axis("step"), Axis("nats per token"), tuple(series), caption.strip(), curves=True)]


def _name_of(entry: Entry) -> str:
    """Its label, with the settings in which it differs if these are few and the label does not say them."""
    differs = entry.rest()
    return (
        entry.label if differs in ("", entry.label) or len(entry.apart) > MOST_SETTINGS else f"{entry.label}: {differs}"
    )


def _line(
    name: str, colour: str, points: Sequence[tuple[int, float]], *, dashed: bool = False, faint: bool = False
) -> Series:
    x, y = zip(*thinned(points), strict=True)
    return Series(name, "line", colour, tuple(map(float, x)), y, dashed=dashed, faint=faint)


def smoothed(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Each value's mean with as many before as after it, fewer at both ends; few points stay as they are.

    Values that are not finite are passed on, and count nowhere.
    """
    last, most = len(points) - 1, len(points) // SMOOTHED_OVER
    if len(points) < SMOOTHED_FROM:
        return points
    finite = [math.isfinite(value) for _, value in points]
    counts = [0, *accumulate(finite)]
    sums = [0.0, *accumulate(value if ok else 0.0 for (_, value), ok in zip(points, finite, strict=True))]
    found = []
    for index, (step, value) in enumerate(points):
        beside = min(index, last - index, most)
        begin, end = index - beside, index + beside + 1
        mean = (sums[end] - sums[begin]) / (counts[end] - counts[begin]) if finite[index] else value
        found.append((step, mean))
    return found


def _evaluations(label: str, run: RunResult, colour: str) -> list[Series]:
    """The losses of the validation set and of each further set, as lines with a mark at each evaluation."""
    steps = tuple(float(each.step) for each in run.evaluations)
    of_set = {"validation": tuple(each.loss for each in run.evaluations)}
    for name in run.validation_sets:
        of_set[NAMED + name] = tuple(each.named.get(name, math.nan) for each in run.evaluations)
    return [
        Series(f"{label} ({name})", "line", colour, steps, losses, marker=SET_MARKERS[index % len(SET_MARKERS)])
        for index, (name, losses) in enumerate(of_set.items())
    ]


def _equal_to(group: Sequence[Entry]) -> str:
    names = [entry.label for entry in group[1:]]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"Equal to {group[0].label} to the bit, and under its curve: {'; '.join(names[:MOST_NAMED])}{more}."


def memory(entries: Sequence[Entry]) -> list[Figure]:
    """Resident memory of rank 0 by category and peak of a step, each measured and planned."""
    chosen: dict[tuple[str, str], Entry] = {}
    for entry in sorted(entries, key=rank_of_strategy):
        if entry.first is not None and any(held(entry.first)):
            chosen.setdefault((entry.strategy, _apart_from_links(entry)), entry)
    if not chosen:
        raise LeftOutError("no run has recorded its memory")
    shown = list(chosen.values())[:MOST_BARS]
    pairs = [held(entry.first) for entry in shown if entry.first is not None]
    unit, scale = memory_unit(table for pair in pairs for table in pair)
    measured, planned = ([pair[which] for pair in pairs] for which in (0, 1))
    has_plan = any(planned)
    labels = [""] * len(shown)
    series = stacked(measured, labels, scale, -0.2 if has_plan else 0.0, 0.36 if has_plan else 0.6, what="measured")
    if has_plan:
        series += stacked(planned, labels, scale, 0.2, 0.36, what="planned", hatched=True)
    series += _peaks(shown, scale)
    caption = "Left bar: measured on rank 0. Right, hatched: planned. " if has_plan else "Measured on rank 0. "
    caption += "Bars: held between backward and update." + (" Marks: the peak of a step." if _peaks(shown, 1) else "")
    x = Axis("", ticks={float(i): _name_in(entry, shown) for i, entry in enumerate(shown)})
    caption = only_first(shown, list(chosen.values()), caption)
    return [Figure("memory", "Memory of a rank", x, Axis(unit, from_zero=True), tuple(series), caption, height=1.15)]


def predictions(entries: Sequence[Entry]) -> list[Figure]:
    """Step time and peak memory, measured against predicted."""
    figures = []
    for name, title, unit, scale in (("step_s", "Step time", "ms", 1e-3), ("peak_bytes", "Peak memory", "MiB", MIB)):
        of_strategy: dict[str, list[tuple[float, float, str]]] = defaultdict(list)
        for entry in sorted(entries, key=rank_of_strategy):
            for run in entry.case.done:
                predicted, measured = pair_of(run, name)
                if predicted > 0 and measured > 0:
                    of_strategy[entry.strategy].append((predicted / scale, measured / scale, entry.label))
        if not of_strategy:
            continue
        series = [
            Series(
                strategy,
                "points",
                style(strategy, index)[0],
                tuple(x for x, _, _ in points),
                tuple(y for _, y, _ in points),
                marker=style(strategy, index)[1],
                notes=tuple(label for _, _, label in points),
            )
            for index, (strategy, points) in enumerate(of_strategy.items())
        ]
        every = [value for points in of_strategy.values() for point in points for value in point[:2]]
        ends = (min(every) / 1.3, max(every) * 1.3)
        guides = [Series("equal", "line", GREY, ends, ends)]
        guides += [
            Series("20 % off" if share > 1 else "", "line", GREY, ends, tuple(e * share for e in ends), dashed=True)
            for share in (1.2, 0.8)
        ]
        off = sorted(abs(y / x - 1) for points in of_strategy.values() for x, y, _ in points)
        half = f"Half of {len(off)} runs are within {off[len(off) // 2]:.1%} of their prediction"
        caption = f"{half}, all within {off[-1]:.1%}."
        x, y = Axis(f"predicted, {unit}", log=True), Axis(f"measured, {unit}", log=True)
        slug = "predicted-" + name.partition("_")[0]
        figures.append(Figure(slug, f"{title}, predicted and measured", x, y, (*guides, *series), caption))
    if not figures:
        raise LeftOutError("no run has a prediction of its peak (--profile.memory) or its step time (--plan.device)")
    return figures


def _peaks(shown: Sequence[Entry], scale: float) -> list[Series]:
    found = []
    for name, index, marker, shift in (("peak, measured", 1, "diamond", -0.2), ("peak, planned", 0, "circle", 0.2)):
        points = [
            (place + shift, pair_of(entry.first, "peak_bytes")[index] / scale) for place, entry in enumerate(shown)
        ]
        points = [point for point in points if math.isfinite(point[1])]
        if points:
            x, y = zip(*points, strict=True)
            found.append(Series(name, "points", PURPLE, x, y, marker=marker))
    return found


def held(run: RunResult) -> tuple[dict[str, int], dict[str, int]]:
    """Resident bytes by category, measured and planned; without a plan, those of the step with the largest sum.

    What is in files takes no memory, and is left out.
    """
    planned: dict[str, int] = {}
    measured: dict[str, int] = {}
    table = plan_of(run).get("memory_bytes")
    for name, pair in table.items() if isinstance(table, Mapping) else ():
        if isinstance(pair, Mapping):
            planned[name], measured[name] = int(pair.get("predicted") or 0), int(pair.get("measured") or 0)
    if not any(measured.values()):
        fullest = max(run.steps, key=lambda step: in_memory(step.memory_bytes), default=None)
        measured = dict(fullest.memory_bytes) if fullest else {}
    measured, planned = (
        {name: n for name, n in table.items() if n and not is_on_disk(name)} for table in (measured, planned)
    )
    return measured, planned


def _apart_from_links(entry: Entry) -> str:
    """The settings that affect its memory and differ from other entries', in words: not those of links."""
    names = [name for name in entry.apart if name.startswith("link")]
    return entry.rest("strategy", *OF_LINKS, *names)


def _name_in(entry: Entry, shown: Sequence[Entry]) -> str:
    """The name of an entry in the figure: its strategy if no other entry has the same, else its label."""
    alike = [other for other in shown if other.strategy == entry.strategy]
    return entry.strategy if entry.strategy and len(alike) == 1 else entry.label


def thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """At most about `MOST_POINTS` of ``points``, evenly, with the first and the last."""
    step = -(-len(points) // MOST_POINTS)
    return [*points[::step], *(points[-1:] if (len(points) - 1) % step else [])]


def memory_unit(tables: Iterable[Mapping[str, int]]) -> tuple[str, float]:
    """The unit in which the largest sum of ``tables``, which are in bytes, is a readable number; and its bytes."""
    most = max(sum(table.values()) for table in tables)
    return ("GiB", GIB) if most >= GIB else ("MiB", MIB) if most >= MIB else ("KiB", 1024)


def stacked(
    tables: Sequence[Mapping[str, int]],
    labels: Sequence[str],
    scale: float,
    shift: float = 0.0,
    width: float = 0.6,
    *,
    what: str = "",
    hatched: bool = False,
) -> list[Series]:
    """A bar for each of ``tables``, bytes by category, stacked from the categories; hatched ones have no legend.

    A mark's note says the category with ``what``, or else with the bar's label and the bytes.
    """
    known = {name for table in tables for name, num_bytes in table.items() if num_bytes}
    names = [name for name in CATEGORY_COLOURS if name in known] + sorted(known - set(CATEGORY_COLOURS))
    bottoms = [0.0] * len(tables)
    series = []
    for name in names:
        words = name.replace("_", " ")
        heights = [table.get(name, 0) / scale for table in tables]
        notes = (
            f"{words}, {what or f'{label}: {size(table.get(name, 0))}'}"
            for label, table in zip(labels, tables, strict=True)
        )
        series.append(
            Series(
                "" if hatched else words,
                "bar",
                CATEGORY_COLOURS.get(name, GREY),
                tuple(place + shift for place in range(len(tables))),
                tuple(heights),
                base=tuple(bottoms),
                width=width,
                hatched=hatched,
                notes=tuple(notes),
            )
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    return series
