import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.data.order import rows

seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10_000)


@given(seeds, epochs, st.integers(1, 700))
def test_each_epoch_visits_each_row_once(seed, epoch, num_rows):
    visited = rows(seed, np.arange(epoch * num_rows, (epoch + 1) * num_rows), num_rows)
    assert visited.dtype == np.int64
    assert sorted(visited.tolist()) == list(range(num_rows))


@given(seeds, st.lists(st.integers(0, 2**40), max_size=40), st.integers(1, 2**40))
def test_a_position_answers_the_same_alone_and_among_others(seed, positions, num_rows):
    together = rows(seed, positions, num_rows)
    assert together.tolist() == [int(rows(seed, position, num_rows)) for position in positions]
    assert all(0 <= row < num_rows for row in together.tolist())


@given(seeds, epochs)
def test_epochs_and_seeds_have_their_own_shuffles(seed, epoch):
    here, next_epoch = rows(seed, np.arange(epoch * 100, (epoch + 2) * 100), 100).reshape(2, 100)
    other_seed = rows(seed + 1, np.arange(epoch * 100, (epoch + 1) * 100), 100)
    assert here.tolist() != next_epoch.tolist()
    assert here.tolist() != other_seed.tolist()
    assert here.tolist() != list(range(100))


@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_each_bit_of_a_seed_of_64_bits_counts(bit):
    def shuffle(seed):
        return rows(seed, np.arange(100), 100).tolist()

    assert shuffle(12345) != shuffle(12345 ^ (1 << bit))
    assert shuffle(12345) == shuffle(12345 + (1 << 64))


def test_positions_far_into_a_huge_corpus_need_no_table():
    num_rows = 10**15
    visited = rows(7, np.arange(3 * num_rows, 3 * num_rows + 10_000), num_rows)
    assert len(set(visited.tolist())) == 10_000
    assert abs(visited.mean() / num_rows - 0.5) < 0.02  # standard error 0.003: a gross bias alone fails


@pytest.mark.parametrize("num_rows", [2, 5, 16, 37])
def test_each_row_is_equally_likely_at_each_place(num_rows):
    num_epochs = 4000
    visited = rows(11, np.arange(num_epochs * num_rows), num_rows).reshape(num_epochs, num_rows)
    counts = np.stack([np.bincount(column, minlength=num_rows) for column in visited.T])
    expected = num_epochs / num_rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (num_rows - 1) ** 2
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5


def test_the_order_is_pinned_so_that_old_runs_can_resume():
    assert rows(0, np.arange(12), 10).tolist() == [3, 7, 0, 5, 2, 6, 9, 4, 1, 8, 2, 4]


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match="num_rows must be at least 1"):
        rows(0, [0], 0)
    with pytest.raises(ValueError, match="negative, got -3"):
        rows(0, [1, -3], 10)
