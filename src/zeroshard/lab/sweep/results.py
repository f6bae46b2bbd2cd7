"""Reads a sweep's folder: each case with its repeats, and the settings of the sweep.

`zeroshard.lab.sweep.sweep` describes the files. As with run folders, a missing or damaged file raises no error here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.lab.run_folders import RunResult, Spread, locks_held, read_object, read_run, spread

SWEEP = "sweep.json"
SWEEP_FORMAT = "zeroshard sweep 1"


@dataclass(frozen=True)
class CaseResult:
    """One case of a sweep with its repeats."""

    name: str  # the hash of its configuration
    axes: Mapping[str, Any]  # its values of the sweep's axes, by dotted name
    runs: tuple[RunResult, ...]  # its repeats, in order, without those that have not begun
    failures: tuple[str, ...]  # a line for each repeat whose last attempt failed

    @property
    def done(self) -> tuple[RunResult, ...]:
        """The repeats that ended successfully."""
        return tuple(run for run in self.runs if run.state == "done")

    @property
    def step_s(self) -> Spread | None:
        """Spread over successful repeats of the median step, in seconds; None if none has steps."""
        return spread(run.step_s for run in self.done)

    @property
    def tokens_per_s(self) -> Spread | None:
        """Spread over successful repeats of the median tokens per second, all ranks together."""
        return spread(run.tokens_per_s for run in self.done)

    @property
    def exposed_s(self) -> Spread | None:
        """Spread over successful repeats of the median exposed communication, in seconds per step."""
        return spread(run.exposed_s for run in self.done)

    @property
    def why_not_comparable(self) -> tuple[str, ...]:
        """Why repeats are not comparable, according to the probes of their links; empty if all are comparable."""
        return tuple(run.link.why_not_comparable for run in self.done if run.link and not run.link.comparable)


@dataclass(frozen=True)
class SweepResult:
    """The contents of a sweep folder: the facts in `SWEEP`, the cases in order, a line for each unreadable part."""

    folder: Path
    facts: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    problems: tuple[str, ...]


def run_folder(sweep: Path, case: str, repeat: int) -> Path:
    """The run folder of a repeat of a case."""
    return sweep / "cases" / case / f"{repeat}"


def failure_file(sweep: Path, case: str, repeat: int) -> Path:
    """The file that exists if the last attempt of a repeat failed: ``{"status", "line", "seconds"}``."""
    return sweep / "cases" / case / f"{repeat}.failed.json"


def read_sweep(folder: str | Path) -> SweepResult:
    """Read every case of a sweep; never raises, whatever is in the folder."""
    folder = Path(folder)
    problems: list[str] = []
    facts = read_object(folder / SWEEP, problems)
    if not facts and not problems:
        problems.append(f"there is no {SWEEP}: no sweep has begun here")
    elif facts and facts.get("format") != SWEEP_FORMAT:
        problems.append(f"{SWEEP}: is not of the format {SWEEP_FORMAT!r}")
    held = locks_held()
    cases = []
    listed = facts.get("cases")
    for entry in listed if isinstance(listed, Sequence) else ():
        try:
            name, axes, repeats = str(entry["name"]), dict(entry["axes"]), int(entry["repeats"])
            if not name.isalnum():
                raise ValueError(f"{name!r} is no case's name")
        except (ValueError, TypeError, KeyError, AttributeError):
            problems.append(f"{SWEEP}: a case cannot be read")
            continue
        folders = [run_folder(folder, name, repeat) for repeat in range(repeats)]
        failures = [read_failure(failure_file(folder, name, repeat)) for repeat in range(repeats)]
        runs = tuple(read_run(each, held) for each in folders if each.is_dir())
        cases.append(CaseResult(name, axes, runs, tuple(line for line in failures if line)))
    return SweepResult(folder, facts, tuple(cases), tuple(problems))


def read_failure(path: Path) -> str:
    """The reason why an attempt failed, in a line; empty if none failed."""
    found = read_object(path, problems := [])
    return str(found.get("line") or "it failed") if found else (problems[0] if problems else "")
