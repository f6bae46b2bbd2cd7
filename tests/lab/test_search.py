import pytest

from zeroshard.lab.sweep.search import largest_that_fits


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
