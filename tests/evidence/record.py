"""Which lines of the package each test runs, also in the ranks and programs that it starts, and what it costs.

Lines are found by coverage.py, whose contexts are the tests. Costs are seconds of the processor: of this process and of
what it has waited for, by `getrusage`; of programs that were forked by the tests' server, by what that notes
(`observed`). What is killed leaves no lines. A record is a folder::

    costs.jsonl       [test, passed, seconds], a line each; of several of one test the last counts
    programs.jsonl    [test, seconds] of each forked program
    lines/            coverage's data, a file for each process, later combined in lines.sqlite
"""

import json
import os
import resource
import sqlite3
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import coverage
import pytest
from coverage.numbits import numbits_to_nums

import observed
from mutants.catalogue import PACKAGE, ROOT

CONFIG = """[run]
include = {package}/*
context = ${{PYTEST_CURRENT_TEST-}}
data_file = {folder}/lines/data
parallel = true
patch = fork
disable_warnings = no-data-collected,module-not-measured,couldnt-parse
"""


LINES = "lines.sqlite"


def cpu_s() -> float:
    """Seconds of the processor that this process and its children, as far as it has waited for them, have had."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Recorder:
    """A plugin of pytest that writes a record; of costs alone where nothing shall trace ``lines``."""

    def __init__(self, folder: Path, lines: bool = True) -> None:
        self.folder, self.passed, self.lines = folder, True, None
        (folder / "lines").mkdir(parents=True, exist_ok=True)
        os.environ[observed.RECORD] = str(folder)
        if not lines:
            return
        config = folder / "coveragerc"
        config.write_text(CONFIG.format(package=ROOT / PACKAGE, folder=folder))
        self.lines = coverage.Coverage(config_file=str(config))
        self.lines.start()
        os.environ["COVERAGE_PROCESS_START"] = str(config)  # of Pythons that a test starts without the server

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Called by pytest around each test, its setup and its teardown."""
        if self.lines is not None:
            self.lines.switch_context(observed.OF_A_TEST + item.nodeid)
        self.passed, before = True, cpu_s()
        done = yield
        with (self.folder / "costs.jsonl").open("a") as file:
            file.write(json.dumps([item.nodeid, self.passed, round(cpu_s() - before, 3)]) + "\n")
        return done

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest after each phase of each test."""
        self.passed &= report.passed  # what was skipped runs nothing that it could see

    def pytest_unconfigure(self) -> None:
        """Called by pytest at its end."""
        if self.lines is not None:
            self.lines.stop()
            self.lines.save()


def combine(folder: Path) -> None:
    """Make one file of all processes' lines, beside those that are known."""
    _add(folder, [str(path) for path in (folder / "lines").iterdir()])


def join(folder: Path, parts: list[Path]) -> None:
    """Make a record of several, of different tests: several processes may record beside each other."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("costs.jsonl", "programs.jsonl"):
        with (folder / name).open("a") as file:
            file.writelines((part / name).read_text() for part in parts if (part / name).exists())
    _add(folder, [str(part / LINES) for part in parts])


def _add(folder: Path, files: list[str]) -> None:
    if files:
        whole = coverage.Coverage(data_file=str(folder / LINES), config_file=False)
        whole.load()
        whole.combine(files, strict=False, keep=files[0].endswith(LINES))
        whole.save()


def costs(folder: Path) -> dict[str, float]:
    """Seconds of the processor of each test that passed."""
    found: dict[str, float] = {}
    for line in (folder / "costs.jsonl").read_text().splitlines():
        test, passed, seconds = json.loads(line)
        found.pop(test, None)
        if passed:
            found[test] = seconds
    programs = folder / "programs.jsonl"
    for line in programs.read_text().splitlines() if programs.exists() else ():
        test, seconds = json.loads(line)
        if test in found:
            found[test] += seconds
    return found


def tests_of_lines(folder: Path) -> dict[tuple[str, int], set[str]]:
    """By file, below the package's folder, and line: which tests run it."""
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    with sqlite3.connect(folder / LINES) as data:
        rows = data.execute(
            "select file.path, context.context, numbits from line_bits join file on file.id = file_id"
            " join context on context.id = context_id"
        )
        for path, context, numbits in rows:
            test = context.rpartition(observed.OF_A_TEST)[2] if observed.OF_A_TEST in context else ""
            test = test or observed.name_of(context)
            if test and path.endswith(".py"):  # and no template of a report
                name = path.rpartition(f"{PACKAGE}/")[2]  # of whichever checkout was recorded
                for line in numbits_to_nums(numbits):
                    found[name, line].add(test)
    return found
