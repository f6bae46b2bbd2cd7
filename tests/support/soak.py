"""What `make test` runs of the tests, and what `make soak` does: ``--soak`` for all of it, ``--shuffle`` for its order.

A test that is marked `pairwise` has every pair of values of its parameters beside each other in `make test`, and every
combination with ``--soak``; as ``pairwise("stage", "place")`` pairs of these alone, and each value of the others. One
that is marked `soak` runs with ``--soak`` only. Hypothesis draws fewer examples without it, and the same ones each
time.
"""

import random
from collections.abc import Generator
from itertools import groupby
from typing import Any

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, list[None], list[None]]:
    """Leave out what only ``--soak`` runs before it becomes an item: making ten thousand takes each worker's time.

    A combination that is asked for by name, ``pytest FILE::test[A-B]``, runs whether the cover has it or not.
    """
    found = yield
    named = any(f"::{metafunc.function.__name__}[" in word for word in metafunc.config.args)
    if not (metafunc.config.getoption("soak") or named):
        metafunc._calls = thinned(metafunc._calls, metafunc.definition.get_closest_marker("pairwise"))
    return found


def thinned(calls: list[Any], pairs: pytest.Mark | None) -> list[Any]:
    """Of the combinations of a test's parameters those without the mark `soak`, and of these a cover of ``pairs``."""
    quick = [call for call in calls if not any(mark.name == "soak" for mark in call.marks)]
    if pairs is not None:
        paired = [list(quick[0].params).index(name) for name in pairs.args] or None
        # A parameter's values need not be hashable; each is one object in all combinations that have it.
        quick = [quick[place] for place in cover([tuple(map(id, call.params.values())) for call in quick], paired)]
    return quick or calls  # without any the test would run with no parameters


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("soak"):
        left_out = [item for item in items if item.get_closest_marker("soak")]
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)
    else:  # the long ones first: at the end of several workers' work nobody waits for one of them
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in a random order, and the tests of each; a file stays together, as its fixtures are made once."""
    order = random.Random(seed)
    files = [list(group) for _, group in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    return [test for tests in files for test in tests]
