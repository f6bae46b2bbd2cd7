"""A search by measurement for the largest micro-batch that fits."""

from __future__ import annotations

import math
from collections.abc import Callable


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
