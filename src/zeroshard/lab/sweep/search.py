"""Searches by measurement: the largest micro-batch that fits, and the bandwidth where two strategies are as fast."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def largest_that_fits(guess: int, peak_bytes: Callable[[int], int | None], budget: int) -> int | None:
    """The largest size whose measured peak is within ``budget``; a larger size must need more.

    Both that size and the next one are measured, whatever the guess. To choose the next size to measure, the search
    assumes that the peak grows at most in proportion to the size.

    Args:
        guess: the first size to measure.
        peak_bytes: measures the peak of a size, in bytes; returns None if the run failed.
        budget: bytes.

    Returns:
        The size; None if not even 1 fits.
    """
    fits, too_large = 0, math.inf
    size = max(guess, 1)
    while True:
        peak = peak_bytes(size)
        if peak is not None and peak <= budget:
            fits = size
            step = max(size + 1, int(size * budget / max(peak, 1)))
            step = min(step, 2 * size)
        else:
            too_large = size
            step = size // 2 if peak is None else min(size - 1, int(size * budget / peak))
        if too_large <= fits + 1:
            return fits or None
        inside = fits < step < too_large
        size = max(step, 1) if inside or (step < 1 and fits == 0) else int(fits + too_large) // 2


@dataclass(frozen=True)
class Crossover:
    """The bandwidth at which two strategies are equally fast, as an interval.

    Attributes:
        low, high: bounds in bytes per second; the whole range of the search if one strategy is faster everywhere.
        first_below: whether the first strategy is faster at ``low``; None if a run failed.
        first_above: whether the first strategy is faster at ``high``; None if a run failed.
        points: measured seconds per step of both strategies, by bytes per second.
    """

    low: float
    high: float
    first_below: bool | None
    first_above: bool | None
    points: Mapping[float, tuple[float, float]]


def crossover(
    low: float, high: float, within: float, step_s: Callable[[float], tuple[float, float]], max_points: int = 12
) -> Crossover:
    """Bisect for the bandwidth at which two strategies take the same time, on a logarithmic scale.

    Args:
        low, high: bounds of the search in bytes per second.
        within: the search ends once ``high / low`` is no more than this.
        step_s: measures seconds per step of both strategies at a bandwidth; NaN for one that failed.
        max_points: bandwidths to measure, at most.
    """
    points: dict[float, tuple[float, float]] = {}

    def first_wins(bytes_per_s: float) -> bool | None:
        points[bytes_per_s] = first, second = step_s(bytes_per_s)
        return None if math.isnan(first) or math.isnan(second) else first < second

    low, high = rounded(low), rounded(high)
    below, above = first_wins(low), first_wins(high)
    while None not in (below, above) and below != above and high / low > within and len(points) < max_points:
        middle = rounded(math.sqrt(low * high))
        if not low < middle < high:
            break
        wins = first_wins(middle)
        if wins is None:
            return Crossover(low, high, None, None, points)
        if wins == below:
            low = middle
        else:
            high = middle
    return Crossover(low, high, below, above, points)


def rounded(value: float) -> float:
    """Round to three digits, so that repeating a search gives its cases the same names."""
    return float(f"{value:.3g}")
