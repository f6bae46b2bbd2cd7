"""Looking for a number by running: the largest micro-batch that fits, the bandwidth at which two strategies draw."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass


def largest_that_fits(guess: int, peak_bytes: Callable[[int], int | None], budget: int) -> int | None:
    """The largest size whose measured peak is within ``budget``, where a larger size needs more.

    Both it and the next one are measured, wherever the guess was; from one measurement to the next the peak is taken
    to grow at most in proportion.

    Args:
        guess: where to begin.
        peak_bytes: of a size, measured; None where it could not run.
        budget: bytes.

    Returns:
        None where not even 1 fits.
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
    """Where two strategies draw.

    Attributes:
        low, high: bytes per second between which they do; the whole range where they do not.
        first_below: whether the first is faster at ``low``; None where that is not known.
        first_above: and at ``high``.
        points: seconds of both by bytes per second, as measured.
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
        low, high: bytes per second.
        within: until ``high / low`` is no more than this.
        step_s: seconds of a step of both at a bandwidth; NaN where one has failed.
        max_points: to measure at.
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
    """To three digits: what is looked for again has the same name."""
    return float(f"{value:.3g}")
