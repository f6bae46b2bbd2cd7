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


def test_the_quick_run_has_a_cover_of_what_is_marked_and_a_shuffle_keeps_files_together():
    class Item:
        def __init__(self, name, marks, **params):
            self.nodeid, self.callspec = name, SimpleNamespace(params=params)
            self.get_closest_marker = lambda mark: mark if mark in marks else None

    def run(items, **options):
        config = SimpleNamespace(getoption=({"soak": False, "shuffle": None} | options).get, hook=hook)
        left = list(items)
        soak.pytest_collection_modifyitems(config, left)
        return left

    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    items = [
        Item(f"a.py::test_product[{at}]", {"pairwise"}, x=at[0], y=at[1], z=at[2]) for at in product(range(4), repeat=3)
    ]
    items += [Item(f"a.py::test_all[{at}]", set(), x=at) for at in range(3)]
    items += [Item("b.py::test_long", {"soak"})]
    left = [each.nodeid for each in run(items)]
    assert 16 <= sum("test_product" in name for name in left) <= 24
    assert sum("test_all" in name for name in left) == 3
    assert "b.py::test_long" not in left
    assert run(items, soak=True) == items
    assert run(items[5:6]) == items[5:6], "one that is asked for by name runs"
    shuffled = [each.nodeid for each in run(items, soak=True, shuffle=1)]
    assert shuffled == [each.nodeid for each in run(items, soak=True, shuffle=1)]
    assert sorted(shuffled) == sorted(each.nodeid for each in items)
    assert "b.py::test_long" in (shuffled[0], shuffled[-1])
