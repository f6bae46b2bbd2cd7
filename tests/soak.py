"""What `make test` runs of the tests, and what `make soak` does: ``--soak`` for all of it, ``--shuffle`` for its order.

A test that is marked `pairwise` has every pair of values of its parameters beside each other in `make test`, and every
combination with ``--soak``. One that is marked `soak` runs with ``--soak`` only. Hypothesis draws fewer examples
without it, and the same ones each time.
"""

from __future__ import annotations

import random
from itertools import groupby

import pytest
from hypothesis import settings

from pairwise import cover

QUICK_EXAMPLES, SOAK_EXAMPLES = 25, 100

_soaking = False


def soaking() -> bool:
    """Whether ``--soak`` was given."""
    return _soaking


def examples(quick: int, soak: int) -> int:
    """How many examples a test of Hypothesis draws that needs a number of its own."""
    return soak if _soaking else quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="all combinations, and tests that are marked soak")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported: it may ask for `examples`."""
    global _soaking
    _soaking = config.getoption("soak")
    # No deadline: machines that run tests are shared.
    settings.register_profile("quick", deadline=None, max_examples=QUICK_EXAMPLES, derandomize=True)
    settings.register_profile("soak", deadline=None, max_examples=SOAK_EXAMPLES)
    settings.load_profile("soak" if _soaking else "quick")


@pytest.hookimpl(trylast=True)  # what -k and -m leave is covered
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("soak"):
        left_out = [item for item in items if item.get_closest_marker("soak")] + _beyond_cover(items)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)
    else:  # the long ones first: at the end of several workers' work nobody waits for one of them
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _beyond_cover(items: list[pytest.Item]) -> list[pytest.Item]:
    """Of tests marked `pairwise`, the combinations that the cover of their parameters does not need."""
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("pairwise"):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: list[pytest.Item] = []
    for same in by_test.values():
        # A parameter's values need not be hashable; each is one object in all combinations that have it.
        needed = set(cover([tuple(map(id, item.callspec.params.values())) for item in same]))
        left_out += [item for place, item in enumerate(same) if place not in needed]
    return left_out


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in a random order, and the tests of each; a file stays together, as its fixtures are made once."""
    order = random.Random(seed)
    files = [list(group) for _, group in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    return [test for tests in files for test in tests]
