import math

import pytest

from zeroshard.lab.sweep.search import crossover, largest_that_fits, rounded


@pytest.mark.pairwise
@pytest.mark.parametrize("largest", [0, 1, 2, 3, 7, 64, 100])
@pytest.mark.parametrize("guess", [0, 1, 5, 90, 1000])
@pytest.mark.parametrize("fixed", [0, 500])
def test_the_largest_that_fits_is_found_wherever_the_guess_was(largest, guess, fixed):
    tried = []

    def peak_bytes(size):
        tried.append(size)
        return None if size > 5 * max(largest, 1) else fixed + 10 * size  # far above it, nothing runs

    budget = fixed + 10 * largest + 9
    assert largest_that_fits(guess, peak_bytes, budget) == (largest or None)
    assert len(tried) == len(set(tried)) <= 16
    assert largest in tried or not largest
    assert largest + 1 in tried


def test_a_good_guess_is_confirmed_with_two_runs():
    tried = []

    def peak_bytes(size):
        tried.append(size)
        return 1000 + 10 * size

    assert largest_that_fits(40, peak_bytes, 1400) == 40
    assert tried == [40, 41]


def _times(draw_at):
    """The first pays for the bandwidth, the second a fixed price."""
    return lambda bytes_per_s: (1.0 + draw_at / bytes_per_s, 2.0)


def test_a_crossover_is_bracketed():
    found = crossover(1e6, 1e9, 1.2, _times(3.3e7))
    assert found.low < 3.3e7 < found.high <= 1.2 * found.low
    assert (found.first_below, found.first_above) == (False, True)
    assert found.points[1e6] == _times(3.3e7)(1e6)


def test_where_one_is_faster_everywhere_two_points_are_enough():
    found = crossover(1e6, 1e9, 1.2, lambda rate: (1.0, 2.0))
    assert (found.low, found.high, found.first_below, found.first_above) == (1e6, 1e9, True, True)
    assert len(found.points) == 2


def test_a_run_that_failed_ends_the_search():
    found = crossover(1e6, 1e9, 1.2, lambda rate: (math.nan, 1.0) if 1e7 < rate < 1e8 else _times(3e7)(rate))
    assert found.first_below is None
    assert len(found.points) == 3


def test_a_number_that_is_looked_for_again_is_the_same():
    assert rounded(123456.0) == 123000.0
    assert rounded(rounded(3.14159e7)) == rounded(3.14159e7) == 31400000.0
