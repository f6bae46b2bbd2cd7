"""Noise by which AdamW's second moment in 8 bits is rounded at random: [Note: Slow moments] in `random_rounding`.

The first moment is rounded to the nearest code: it moves by a tenth a step, so no code stays for long, and noise would
only add to its error.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

# Wellons 2018, "Prospecting for hash functions", https://nullprogram.com/blog/2018/07/31/: shifts and factors
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))


@lru_cache(maxsize=8)  # of the few counts of steps that parameters of an optimizer have
def block_noise(step: int, block: int) -> NDArray[np.float32]:
    """Return what is added to an element before it is rounded down, [block], from 0 to 1 - 2^-16.

    It is a hash of the element's place in its block and of the parameter's count of steps. So it is the same at each
    stage and number of ranks, and after a resume; an element meets independent noise in each step.
    """
    word = np.arange(block, dtype=np.uint32) * np.uint32(0x9E3779B1) + np.uint32(step * 0x85EBCA77 & 0xFFFFFFFF)
    for shift, factor in _ROUNDS:
        word = (word ^ word >> np.uint32(shift)) * np.uint32(factor)
    word ^= word >> np.uint32(15)
    noise = (word >> np.uint32(16)).astype(np.float32) * np.float32(2.0**-16)
    noise.setflags(write=False)
    return noise
