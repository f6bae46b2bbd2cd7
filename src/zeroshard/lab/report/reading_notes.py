"""Notes that a figure's caption needs: how many runs are behind it, and which of its lines coincide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from zeroshard.lab.report.entries import Entry
from zeroshard.lab.report.figure import Figure, Series

SAME_WITHIN = 0.03  # lines coincide if they are nearer than this share of the range of all values
COMPARED = ("throughput", "scaling", "communication", "relative")  # figures in which readers compare lines or bars
_LARGEST, _SMALLEST = 19.0, 7.0  # pixels: sizes of the markers of coinciding lines


def with_notes(figure: Figure, entries: Sequence[Entry]) -> Figure:
    """``figure`` with notes added to its caption, and nested markers on lines that coincide."""
    notes = []
    if figure.name.startswith(COMPARED):
        notes.append(note_of_repeats(entries))
    groups = coinciding(figure.series, log=figure.y.log)
    notes += [_note_of(group) for group in groups]
    series = _nested(figure.series, groups)
    caption = " ".join(filter(None, [figure.caption, *notes]))
    return replace(figure, series=series, caption=caption)


def note_of_repeats(entries: Sequence[Entry]) -> str:
    """A note on how many repeats there are, so that readers do not conclude from noise; empty without finished runs."""
    counts = [len(entry.case.done) for entry in entries if entry.case.done]
    single = counts.count(1)
    if not single:
        return "Whiskers: from the lowest to the highest repeat." if counts else ""
    if single == len(counts):
        return "One run each: do not conclude from small differences."
    return f"Whiskers: lowest to highest repeat. {single} of {len(counts)} ran once: do not conclude from those."


def coinciding(series: Sequence[Series], *, log: bool = False) -> list[list[Series]]:
    """Groups of named lines with markers that lie on each other, so that a reader cannot distinguish them.

    Args:
        series: the series of one figure.
        log: whether its y axis is logarithmic.
    """
    candidates = [line for line in series if line.mark == "line" and line.marker and line.name]
    values = [y for line in candidates for y in line.y]
    if not values or not all(map(math.isfinite, values)) or (log and min(values) <= 0):
        return []
    place: Callable[[float], float] = math.log if log else float
    apart = SAME_WITHIN * (place(max(values)) - place(min(values)))
    groups: list[list[Series]] = []
    for line in candidates:
        for group in groups:
            first = group[0]
            if first.x == line.x and all(
                abs(place(a) - place(b)) <= apart for a, b in zip(first.y, line.y, strict=True)
            ):
                group.append(line)
                break
        else:
            groups.append([line])
    return [group for group in groups if len(group) > 1]


def _note_of(group: Sequence[Series]) -> str:
    most = max(
        max(ys) / min(ys) - 1 if min(ys) > 0 else math.nan for ys in zip(*(line.y for line in group), strict=True)
    )
    differ = f": they differ by at most {most:.1%}" if math.isfinite(most) else ""
    return f"{_listed([line.name for line in group])} lie on each other{differ}."


def _nested(series: Sequence[Series], groups: Sequence[Sequence[Series]]) -> tuple[Series, ...]:
    """Give the first line of a group the largest marker, and each line that is drawn over it a smaller one."""
    sizes: dict[int, float] = {}
    for group in groups:
        step = (_LARGEST - _SMALLEST) / (len(group) - 1)
        sizes |= {id(each): _LARGEST - step * place for place, each in enumerate(group)}
    return tuple(replace(each, marker_size=sizes[id(each)]) if id(each) in sizes else each for each in series)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
