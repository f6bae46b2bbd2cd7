"""A sweep's folder as facts: each case with its repeats, and what the sweep says of itself.

`zeroshard.lab.sweep.sweep` says what lies where; as with run folders, nothing that is missing or damaged is an error.
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
    """One case of a sweep with its repeats.

    Attributes:
        name: the hash of its configuration.
        axes: what sets it apart from the others, by dotted name.
        runs: its repeats, in order; those that have not begun are not there.
        failures: of attempts that failed, a line each.
        curve: where only its first steps were timed, the name of the case that was trained to the end in its place;
            its own where it is such a case; else empty.
    """

    name: str
    axes: Mapping[str, Any]
    runs: tuple[RunResult, ...]
    failures: tuple[str, ...]
    curve: str = ""

    @property
    def is_curve(self) -> bool:
        """Whether it was trained to the end, for others of which only steps were timed."""
        return self.curve == self.name

    @property
    def done(self) -> tuple[RunResult, ...]:
        """The repeats that have ended well."""
        return tuple(run for run in self.runs if run.state == "done")

    @property
    def step_s(self) -> Spread | None:
        """Of the repeats' medians, in seconds."""
        return spread(run.step_s for run in self.done)

    @property
    def tokens_per_s(self) -> Spread | None:
        """Of the repeats' medians, all ranks together."""
        return spread(run.tokens_per_s for run in self.done)

    @property
    def exposed_s(self) -> Spread | None:
        """Of the repeats' medians, in seconds a step."""
        return spread(run.exposed_s for run in self.done)

    @property
    def why_not_comparable(self) -> tuple[str, ...]:
        """What probes had to say against its repeats; empty where nothing."""
        return tuple(run.link.why_not_comparable for run in self.done if run.link and not run.link.comparable)


@dataclass(frozen=True)
class SweepResult:
    """A sweep folder: its cases in order, and what could not be read."""

    folder: Path
    facts: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    problems: tuple[str, ...]


def run_folder(sweep: Path, case: str, repeat: int) -> Path:
    """Where a repeat of a case runs."""
    return sweep / "cases" / case / f"{repeat}"


def failure_file(sweep: Path, case: str, repeat: int) -> Path:
    """What is there when the last attempt of a repeat has failed: ``{"status", "line", "seconds"}``."""
    return sweep / "cases" / case / f"{repeat}.failed.json"


def read_sweep(folder: str | Path) -> SweepResult:
    """Every case of a sweep; never fails, whatever is in the folder."""
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
            curve = str(entry.get("curve", ""))
            if not name.isalnum():
                raise ValueError(f"{name!r} is no case's name")
        except (ValueError, TypeError, KeyError, AttributeError):
            problems.append(f"{SWEEP}: a case cannot be read")
            continue
        folders = [run_folder(folder, name, repeat) for repeat in range(repeats)]
        failures = [read_failure(failure_file(folder, name, repeat)) for repeat in range(repeats)]
        runs = tuple(read_run(each, held) for each in folders if each.is_dir())
        cases.append(CaseResult(name, axes, runs, tuple(line for line in failures if line), curve))
    return SweepResult(folder, facts, tuple(cases), tuple(problems))


def read_failure(path: Path) -> str:
    """Why an attempt failed, in a line; empty where none has."""
    found = read_object(path, problems := [])
    return str(found.get("line") or "it failed") if found else (problems[0] if problems else "")
