"""What `make test` runs of the tests, and what `make soak` does: ``--soak`` for all of it, ``--shuffle`` for its order.

A test that is marked `pairwise` has every pair of values of its parameters beside each other in `make test`, and every
combination with ``--soak``; as ``pairwise("stage", "place")`` pairs of these alone, and each value of the others. One
that is marked `soak` runs with ``--soak`` only, and so does one that `tests/evidence` has marked `redundant`, as others
run its lines and see the mistakes that it sees; ``redundant(but=[ID, ...])`` leaves these combinations of its
parameters. Hypothesis draws fewer examples without it, and the same ones each time.

``--part WORD`` runs a small part of what only ``--soak`` runs, and nothing else: of one file in 16 two combinations of
each test that is not `slow`, all chosen by the word. A commit's hash is one, so that each commit runs other ones.
"""

import random
import time
import zlib
from collections.abc import Generator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from pairwise import cover

QUICK_EXAMPLES, SOAK_EXAMPLES = 25, 100
NUM_PARTS, MOST_OF_A_TEST = 16, 2

_soaking = False
_narrowed: set[str] = set()  # tests of which only some combinations are in the part
_left_out = 0  # tests of this process that only --soak runs
_began = time.monotonic()
_LEFT_OUT = "tests_left_out"  # as a worker tells it, and as the last whole run is remembered
_LAST_SOAK = "soak/last"


def soaking() -> bool:
    """Whether ``--soak`` was given."""
    return _soaking


def examples(quick: int, soak: int) -> int:
    """How many examples a test of Hypothesis draws that needs a number of its own."""
    return soak if _soaking else quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="all combinations, and tests that are marked soak")
    parser.addoption("--part", metavar="WORD", help="of what only --soak runs a small part, which the word chooses")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests of each, in a random order")


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module is imported: it may ask for `examples`."""
    global _soaking
    config.option.soak = _soaking = config.getoption("soak") or bool(config.getoption("part"))
    # No deadline: machines that run tests are shared.
    settings.register_profile("quick", deadline=None, max_examples=QUICK_EXAMPLES, derandomize=True)
    settings.register_profile("soak", deadline=None, max_examples=SOAK_EXAMPLES)
    settings.load_profile("soak" if _soaking else "quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a part other files are not read."""
    part, name = config.getoption("part"), collection_path.name
    is_test = name.startswith("test_") and name.endswith(".py")
    return True if part and is_test and zlib.crc32(f"{part} {name}".encode()) % NUM_PARTS else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Generator[None, list[None], list[None]]:
    """Leave out what only ``--soak`` runs before it becomes an item: making ten thousand takes each worker's time.

    A combination that is asked for by name, ``pytest FILE::test[A-B]``, runs whether the cover has it or not.
    """
    global _left_out
    found = yield
    named = any(f"::{metafunc.function.__name__}[" in word for word in metafunc.config.args)
    part = metafunc.config.getoption("part")
    if part:
        quick = [] if _only_with_soak(metafunc.definition) else _quick(metafunc)
        more = [call for call in metafunc._calls if call not in quick]
        if metafunc._calls and more:
            _narrowed.add(metafunc.definition.nodeid)
            drawn = random.Random(f"{part} {metafunc.definition.nodeid}")
            metafunc._calls = drawn.sample(more, min(MOST_OF_A_TEST, len(more)))
    elif not (metafunc.config.getoption("soak") or named):
        before = len(metafunc._calls)
        metafunc._calls = _quick(metafunc)
        _left_out += before - len(metafunc._calls)
    return found


def _quick(metafunc: pytest.Metafunc) -> list[Any]:
    """The combinations that `make test` runs."""
    marks, redundant = metafunc.definition, metafunc.definition.get_closest_marker("redundant")
    if redundant is not None and redundant.kwargs:
        return those_but(metafunc._calls, redundant.kwargs["but"], marks.nodeid)
    return thinned(metafunc._calls, marks.get_closest_marker("pairwise"))


def thinned(calls: list[Any], pairs: pytest.Mark | None) -> list[Any]:
    """Of the combinations of a test's parameters those without the mark `soak`, and of these a cover of ``pairs``."""
    quick = [call for call in calls if not any(mark.name == "soak" for mark in call.marks)]
    if pairs is not None:
        paired = [list(quick[0].params).index(name) for name in pairs.args] or None
        # A parameter's values need not be hashable; each is one object in all combinations that have it.
        quick = [quick[place] for place in cover([tuple(map(id, call.params.values())) for call in quick], paired)]
    return quick or calls  # without any the test would run with no parameters


def those_but(calls: list[Any], ids: list[str], test: str) -> list[Any]:
    """Of the combinations of a test that is marked `redundant` those that are not.

    Raises:
        pytest.UsageError: one of them is not there any more, so that nobody would run it.
    """
    if missing := set(ids) - {call.id for call in calls}:
        raise pytest.UsageError(f"{test}: redundant(but=...) names no combination of its parameters: {sorted(missing)}")
    return [call for call in calls if call.id in ids]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    global _left_out
    part = config.getoption("part")
    if part or not config.getoption("soak"):
        left_out = [item for item in items if (_is_of_part if part else _only_with_soak)(item) != bool(part)]
        gone = set(left_out)
        _left_out += len(left_out)
        items[:] = [item for item in items if item not in gone]
        config.hook.pytest_deselected(items=left_out)
    seed = config.getoption("shuffle")
    if seed is not None:
        items[:] = shuffled(items, seed)
    else:  # the long ones first: at the end of several workers' work nobody waits for one of them
        items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _is_of_part(item: pytest.Item) -> bool:
    left_out = _only_with_soak(item) or item.nodeid.partition("[")[0] in _narrowed
    return left_out and item.get_closest_marker("slow") is None  # some of these take many minutes


def _only_with_soak(item: pytest.Item) -> bool:  # or the definition of several
    redundant = item.get_closest_marker("redundant")
    return item.get_closest_marker("soak") is not None or (redundant is not None and not redundant.kwargs)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells how many tests it has left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput[_LEFT_OUT] = _left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Called by xdist when a worker has ended; all of them have collected the same."""
    global _left_out
    _left_out = max(_left_out, getattr(node, "workeroutput", {}).get(_LEFT_OUT, 0))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how long the tests took, and what ``make soak`` would add; or which part of it this was."""
    if config.getoption("part"):
        ended = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, ())]
        ran = sorted({report.nodeid for report in ended})
        terminalreporter.write_line(f"{len(ran)} tests are the part {config.getoption('part')} of `make soak`:")
        for test in ran:
            terminalreporter.write_line(f"  {test}")
        return
    if config.args != config.getini("testpaths") or config.getoption("collectonly"):
        return  # some tests alone
    seconds = time.monotonic() - _began
    passed = len(terminalreporter.stats.get("passed", ()))
    terminalreporter.write_line(f"{passed:,} tests passed, in {_minutes(seconds)}.")
    cache = getattr(config, "cache", None)
    if _soaking and cache is not None:
        cache.set(_LAST_SOAK, [passed, seconds])
    elif not _soaking:
        tests, took = cache.get(_LAST_SOAK, [0, 0.0]) if cache is not None else [0, 0.0]
        before = f"; the last one here ran {tests:,} in {_minutes(took)}" if tests else "; it has not run here"
        terminalreporter.write_line(f"`make soak` would add {_left_out:,}, and longer runs of some{before}.")


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f} minutes"


def shuffled(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Files in a random order, and the tests of each; a file stays together, as its fixtures are made once."""
    order = random.Random(seed)
    files = [list(group) for _, group in groupby(items, key=lambda item: item.nodeid.partition("::")[0])]
    order.shuffle(files)
    for tests in files:
        order.shuffle(tests)
    return [test for tests in files for test in tests]
