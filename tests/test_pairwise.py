"""The pairwise cover, and what of the tests `make test` leaves to `make soak`."""

from __future__ import annotations

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


def test_values_are_of_their_axis_and_pairs_that_occur_nowhere_are_not_asked_for():
    assert cover([(0, 1), (1, 0)]) == [0, 1]
    assert cover([(0, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 1, 1)]) == [0, 1, 2, 3]
    assert cover([(1, 1, 1), (0, 0, 0)]) == [0, 1]
    assert cover([("a",), ("b",), ("a",)]) == [0, 1]
    assert cover([()]) == [0]
    assert cover([]) == []


def test_the_quick_run_has_a_cover_without_what_is_marked_soak():
    calls = [SimpleNamespace(params=dict(enumerate(at)), marks=[]) for at in product(range(4), repeat=3)]
    for call in calls[:16]:
        call.marks = [pytest.mark.soak.mark]
    found = soak.thinned(calls, by_pairs=True)
    assert not any(call.marks for call in found)
    assert 16 <= len(found) <= 24
    assert soak.thinned(calls, by_pairs=False) == calls[16:]
    assert soak.thinned(calls[:16], by_pairs=True) == calls[:16]


def test_a_shuffle_keeps_files_together_and_is_the_same_for_the_same_seed():
    items = [
        SimpleNamespace(nodeid=f"{name}.py::test_{at}") for name, count in (("a", 60), ("b", 1)) for at in range(count)
    ]
    shuffled = soak.shuffled(items, 1)
    assert shuffled == soak.shuffled(items, 1) != items
    assert sorted(each.nodeid for each in shuffled) == sorted(each.nodeid for each in items)
    assert "b.py::test_0" in (shuffled[0].nodeid, shuffled[-1].nodeid)
