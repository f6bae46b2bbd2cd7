"""Map a position in the training stream to a row of the corpus: a fresh shuffle each epoch, in constant memory.

The stream visits every row once per epoch. The shuffle of an epoch is a keyed pseudo-random permutation that can be
evaluated at single points. So any position of any epoch is answered without a table of rows and without replaying the
positions before it, and every rank gets the same answer. Resuming needs only one integer.

    position = epoch * num_rows + index        row = P[seed, epoch](index)

``P`` is a balanced Feistel network over the smallest power of four, 64 or more, that is at least ``num_rows``, with
*cycle walking*: a value that falls outside ``[0, num_rows)`` is sent through the network again until it falls inside,
which keeps the map a permutation of ``[0, num_rows)`` (Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains",
CT-RSA). The round function is the output mix of SplitMix64 (Steele, Lea and Flood 2014, "Fast Splittable Pseudorandom
Number Generators", OOPSLA). It is a shuffle, not a cipher: nothing here is secret.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

_NUM_ROUNDS = 6
_MIN_HALF_BITS = 3  # fewer bits leave too few distinct networks to shuffle a handful of rows fairly
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK_64 = (1 << 64) - 1


def rows(seed: int, positions: ArrayLike, num_rows: int) -> NDArray[np.int64]:
    """Return the rows of the corpus that the stream visits at ``positions``.

    Args:
        seed: any integer; its low 64 bits choose the shuffle.
        positions: integers >= 0 of any shape, counted from the start of training over all epochs.
        num_rows: rows of the corpus, >= 1.

    Returns:
        int64 in ``[0, num_rows)``, of the shape of ``positions``. Over one epoch each row appears once.

    Raises:
        ValueError: ``num_rows`` < 1 or a negative position.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows must be at least 1, got {num_rows}")
    wanted = np.asarray(positions, dtype=np.int64)
    if wanted.size and int(wanted.min()) < 0:
        raise ValueError(f"positions must not be negative, got {int(wanted.min())}")
    epoch, index = np.divmod(wanted.reshape(-1), num_rows)
    keys = _round_keys(seed, epoch.astype(np.uint64))
    return _permute(index.astype(np.uint64), keys, num_rows).astype(np.int64).reshape(wanted.shape)


def _round_keys(seed: int, epoch: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one key per round and element, [num_rounds, n]; elements of the same epoch have the same keys."""
    seed_key = _mix(np.array([seed & _MASK_64], dtype=np.uint64))
    epoch_key = _mix(epoch * _GOLDEN + seed_key)
    number = np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64)
    return _mix(epoch_key[None, :] + number[:, None] * _GOLDEN)


def _permute(index: NDArray[np.uint64], keys: NDArray[np.uint64], num_rows: int) -> NDArray[np.uint64]:
    """Permute ``[0, num_rows)``: repeat the network on each value until it is below ``num_rows``."""
    half_bits = max(_MIN_HALF_BITS, ((num_rows - 1).bit_length() + 1) // 2)
    value = _feistel(index, keys, half_bits)
    outside = np.flatnonzero(value >= num_rows)
    while outside.size:
        value[outside] = _feistel(value[outside], keys[:, outside], half_bits)
        outside = outside[value[outside] >= num_rows]
    return value


def _feistel(value: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    """Permute ``[0, 4**half_bits)`` for each key; it is a permutation whatever the round function is."""
    shift, unused = np.uint64(half_bits), np.uint64(64 - half_bits)
    left, right = value >> shift, value & np.uint64((1 << half_bits) - 1)
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) >> unused)
    return (left << shift) | right


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, which mixes 64 bits. Takes arrays only, because they overflow without a warning."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
