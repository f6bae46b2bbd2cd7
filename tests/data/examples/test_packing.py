"""Rows that hold several examples: each example once, none beyond its row, positions and targets its own."""

import numpy as np
import pytest

from zeroshard.data.examples.packing import pack

SEQ_LEN = 64


def lengths_of(count, seed, longest=SEQ_LEN):
    drawn = np.random.default_rng(seed).exponential(longest / 4, count)
    return np.clip(drawn.astype(np.int64), 1, longest)


@pytest.mark.parametrize(("count", "seed"), [(1, 0), (7, 1), (500, 2), (5000, 3)])
def test_each_example_is_in_one_row_and_rows_are_nearly_full(count, seed):
    lengths = lengths_of(count, seed)
    first, members = pack(lengths, SEQ_LEN)
    assert sorted(members.tolist()) == list(range(count))
    sums = np.add.reduceat(lengths[members], first[:-1])
    assert first[0] == 0
    assert first[-1] == count
    assert sums.max() <= SEQ_LEN
    least = -(-int(lengths.sum()) // SEQ_LEN)
    assert sums.size <= least * 1.02 + 1
    assert all(np.array_equal(a, b) for a, b in zip(pack(lengths, SEQ_LEN), (first, members), strict=True))


def best_fit_decreasing(lengths):
    """One example after the other, as the definition has it; rooms of rows as they come to be."""
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= length]
        room = min(fitting) if fitting else SEQ_LEN
        if fitting:
            rooms.remove(room)
        rooms.append(room - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(5))
def test_rows_are_those_of_best_fit_decreasing(seed):
    lengths = lengths_of(200, seed)
    first, members = pack(lengths, SEQ_LEN)
    sums = np.add.reduceat(lengths[members], first[:-1])
    assert sorted((SEQ_LEN - sums).tolist()) == best_fit_decreasing(lengths)
