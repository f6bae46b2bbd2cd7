"""The pairwise cover, and what of the tests `make test` leaves to `make soak`."""

from itertools import product
from types import SimpleNamespace

import pytest

import soak
from pairwise import cover, pairs_of


@pytest.mark.parametrize("sizes", [(4, 4, 3, 2), (5, 4, 2, 2), (15, 4, 2, 4), (3, 3, 3, 3, 3), (2, 7), (1, 1, 6)])
def test_every_pair_is_in_the_cover_and_no_combination_that_adds_none(sizes):
    whole = list(product(*map(range, sizes)))
    chosen = cover(whole)
    assert chosen == sorted(set(chosen))
    assert set().union(*(pairs_of(whole[place]) for place in chosen)) == set().union(*map(pairs_of, whole))
    largest, second = sorted(sizes)[-2:][::-1]
    assert largest * second <= len(chosen) <= 1.7 * largest * second
    assert cover(whole) == chosen


def test_the_quick_run_has_a_cover_without_what_is_marked_soak():
    calls = [SimpleNamespace(params=dict(enumerate(at)), marks=[]) for at in product(range(4), repeat=3)]
    for call in calls[:16]:
        call.marks = [pytest.mark.soak.mark]
    found = soak.thinned(calls, by_pairs=True)
    assert not any(call.marks for call in found)
    assert 16 <= len(found) <= 24
    assert soak.thinned(calls, by_pairs=False) == calls[16:]
    assert soak.thinned(calls[:16], by_pairs=True) == calls[:16]
