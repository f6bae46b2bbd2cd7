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


class _Item:
    """A test with one value of each parameter, as far as it is looked at."""

    def __init__(self, nodeid, marks, **params):
        self.nodeid, self.marks = nodeid, marks
        self.callspec = SimpleNamespace(params=params)

    def get_closest_marker(self, name):
        return name if name in self.marks else None


def _run(items, **options):
    """What is run of ``items``, and how many are told as left out."""
    told = []
    hook = SimpleNamespace(pytest_deselected=lambda items: told.extend(items))
    config = SimpleNamespace(getoption=({"soak": False, "shuffle": None} | options).get, hook=hook)
    left = list(items)
    soak.pytest_collection_modifyitems(config, left)
    assert not set(told) & set(left)
    assert options.get("shuffle") is not None or [item for item in items if item not in told] == left
    return left


@pytest.fixture
def items():
    product_of_three = [
        _Item(f"a.py::test_product[{x}-{y}-{z}]", {"pairwise"}, x=x, y=y, z=z)
        for x, y, z in product(range(4), range(4), range(4))
    ]
    return [
        *product_of_three,
        *(_Item(f"a.py::test_all[{x}-{y}]", set(), x=x, y=y) for x, y in product(range(3), range(3))),
        _Item("b.py::test_long", {"soak"}),
    ]


def test_the_quick_run_has_a_cover_of_what_is_marked_and_the_rest_whole(items):
    left = _run(items)
    assert 16 <= sum("test_product" in item.nodeid for item in left) <= 24
    assert sum("test_all" in item.nodeid for item in left) == 9
    assert all(item.nodeid != "b.py::test_long" for item in left)
    assert _run(items, soak=True) == items
    assert _run(items[5:6]) == items[5:6], "one that is asked for by name runs"


def test_a_shuffle_keeps_files_together_and_is_the_same_for_the_same_seed(items):
    shuffled = _run(items, soak=True, shuffle=1)
    assert shuffled == _run(items, soak=True, shuffle=1)
    assert shuffled != items
    assert set(shuffled) == set(items)
    assert [item.nodeid[:4] for item in shuffled] in (["a.py"] * 73 + ["b.py"], ["b.py"] + ["a.py"] * 73)
