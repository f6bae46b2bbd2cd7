"""What a program that a test starts does for `tests/evidence`: it says which lines it runs and what it costs, or it
has a mistake in it.

A program knows by the environment: ``ZEROSHARD_TESTS_RECORD`` names the folder of a record, ``ZEROSHARD_TESTS_MISTAKE``
is a mistake. Without them nothing here does anything.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

RECORD, MISTAKE, TEST = "ZEROSHARD_TESTS_RECORD", "ZEROSHARD_TESTS_MISTAKE", "PYTEST_CURRENT_TEST"
OF_A_TEST = "test:"  # before its name, as a context of coverage's


def begin() -> None:
    """Called by a forked program before its own code."""
    if RECORD in os.environ and (config := Path(os.environ[RECORD]) / "coveragerc").exists():
        import coverage

        os.environ["COVERAGE_PROCESS_START"] = str(config)
        coverage.process_startup(force=True)
    if MISTAKE in os.environ:
        sys.path.append(str(Path(__file__).parents[1]))
        from evidence.mistakes import Mistake

        Mistake(*json.loads(os.environ[MISTAKE])).make()


def program_ended(environment: dict[str, str], args: list[str], used: Any) -> None:
    """Note what a program cost; the server has waited for it. A pool's ranks say it themselves, task by task."""
    if RECORD in environment and not args[0].endswith("ranks.py"):
        _note(environment[RECORD], environment.get(TEST, ""), used.ru_utime + used.ru_stime)


@contextlib.contextmanager
def task(test: str) -> Generator[None]:
    """What a rank of a pool does now is a part of this test."""
    if RECORD not in os.environ:
        yield
        return
    began = time.process_time()
    if "coverage" in sys.modules and (running := sys.modules["coverage"].Coverage.current()) is not None:
        running.switch_context(OF_A_TEST + name_of(test))
    try:
        yield
    finally:
        _note(os.environ[RECORD], test, time.process_time() - began)


def name_of(test: str) -> str:
    """A test's node id, of what pytest puts into the environment: it ends in the phase, as in `` (call)``."""
    return test.rpartition(" (")[0]


def _note(folder: str, test: str, cpu_s: float) -> None:
    if test:
        with (Path(folder) / "programs.jsonl").open("a") as file:  # short lines are appended whole
            file.write(json.dumps([name_of(test), round(cpu_s, 3)]) + "\n")
