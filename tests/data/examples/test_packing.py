"""Rows that hold several examples: each example once, none beyond its row, positions and targets its own."""

from __future__ import annotations

import numpy as np
import pytest

from zeroshard.data.examples.packing import pack
from zeroshard.data.examples.plain import Documents
from zeroshard.data.examples.row_plan import rows_of_length
from zeroshard.data.tokens import TokenDataset

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


EOS = 9
TEXT = [1, 2, EOS, 3, 4, 5, 6, 7, 8, 1, EOS, EOS, 2, EOS]


@pytest.mark.parametrize("tokens", [TEXT, [EOS, *TEXT], TEXT[:-1], [1, 2, 3], [EOS, EOS]])
def test_documents_are_packed_whole_and_each_token_is_a_target_once(tokens):
    stream = TokenDataset([np.array(tokens, np.uint16)], 16)
    rows = rows_of_length(Documents(stream, EOS, 4), 4, split="train", packed=True)
    found, targets, positions = (each.numpy() for each in rows.read(np.arange(rows.num_rows)))
    assert sorted(targets[targets != -100].tolist()) == sorted(tokens[1:])
    begins = positions == 0
    for row in range(rows.num_rows):
        for at in range(4):
            assert positions[row, at] == (0 if begins[row, at] else positions[row, at - 1] + 1)
            if targets[row, at] != -100 and found[row, at] == EOS:
                assert begins[row, at]  # what an end begins is seen by nothing before it
            if at and targets[row, at] != -100 and not begins[row, at]:
                assert targets[row, at - 1] == found[row, at]
    assert rows.num_inputs.sum() == len(tokens) - 1
    assert rows.share_filled == (len(tokens) - 1) / (4 * rows.num_rows)
