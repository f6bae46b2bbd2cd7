"""Reads run folders: the only code that parses ``config.toml``, ``metrics.jsonl`` and ``summary.json``.

A folder may belong to a run that is still running, was killed, or was damaged later. None of that raises an error here:
everything readable is read, each unreadable part becomes a line in ``problems``, and ``state`` is one of:

    done         the run ended successfully
    failed       the run ended with an error, and its summary says so
    running      a process holds the folder's lock
    unfinished   no process holds the lock, and the run did not end: it was killed, or the machine went down
    damaged      something in the folder cannot be read
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import json_of, read_text, toml_of
from zeroshard.lab.metrics_log import Evaluation, number_of, read_log, why_unread
from zeroshard.train.config.toml import RESOLVED, as_resolved
from zeroshard.train.records.log_files import METRICS, SUMMARY
from zeroshard.train.records.records import StepRecord
from zeroshard.train.state.lock import LOCK

State = Literal["done", "failed", "running", "unfinished", "damaged"]
CONFIG = "config.toml"
WARM_UP_STEPS = 2  # a run's first steps, left out of its medians: the first allocates, the second is still slower


@dataclass(frozen=True)
class LinkFacts:
    """The slowed link of a run: how it was slowed, what its probe measured, and whether that is what was asked for."""

    mode: str
    achieved_bytes_per_s: float
    achieved_latency_s: float
    comparable: bool
    why_not_comparable: str


@dataclass(frozen=True)
class Spread:
    """Median, lowest, highest and number of several measurements of one quantity."""

    median: float
    low: float
    high: float
    count: int

    def text(self, scale: float, form: str, unit: str = "") -> str:
        """Format it: ``12.3``, or, of several measurements, with the lowest and highest ``12.3 (11.9 to 14.0)``."""
        middle = f"{self.median * scale:{form}}{unit}"
        return f"{middle} ({self.low * scale:{form}} to {self.high * scale:{form}})" if self.count > 1 else middle


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of the finite values; None if no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(statistics.median(finite), min(finite), max(finite), len(finite)) if finite else None


def scaled(found: Spread | None, scale: float) -> Spread | None:
    """The spread converted to another unit: every value times ``scale``."""
    return Spread(found.median * scale, found.low * scale, found.high * scale, found.count) if found else None


@dataclass(frozen=True)
class RunResult:
    """The contents of a run folder."""

    folder: Path  # the run's folder
    state: State  # see the module's docstring
    # all settings, nested, those that were given and what the others became; empty if that cannot be read
    config: Mapping[str, Any]
    # the ``start`` event that the run logged when it last began: world_size, tokens_per_step, num_params, ...
    start: Mapping[str, Any]
    # the steps in order, each once: a step that was repeated after a resume replaces the earlier one
    steps: tuple[StepRecord, ...]
    evaluations: tuple[Evaluation, ...]  # evaluations in order of steps
    summary: Mapping[str, Any]  # the contents of ``summary.json``; empty if there is none
    link: LinkFacts | None  # the link that the run slowed; None if it slowed none
    problems: tuple[str, ...]  # one line for each thing that could not be read
    # begun, last_at: time of day of the first and of the last logged event, as ISO 8601; empty if not logged
    begun: str = ""
    last_at: str = ""
    # those of these settings that were given; all of them for a run of an earlier version
    given: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def settled(self) -> tuple[StepRecord, ...]:
        """The steps after the warm-up steps, or all steps if there are no others."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @cached_property
    def rounds(self) -> tuple[tuple[StepRecord, ...], ...]:
        """The settled steps in rounds, from one synchronisation of replicas to the next. Each step is its own round
        if replicas take no local steps, or if the run did not complete a round of them.
        """
        every = self.setting("local_steps.every", 1)
        every = every if isinstance(every, int) and 1 < every <= len(self.settled) else 1
        return tuple(self.settled[i : i + every] for i in range(0, len(self.settled) - every + 1, every))

    @cached_property
    def step_s(self) -> float:
        """Seconds of the median step; with local steps, the mean step of the median round. NaN without steps."""
        return _median(statistics.fmean(step.step_s for step in steps) for steps in self.rounds)

    @cached_property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together, in the median step or the median round; NaN without steps."""
        return _median(_rate(steps) for steps in self.rounds)

    @cached_property
    def exposed_s(self) -> float:
        """Seconds per step for which rank 0 waited for communication (median); NaN without steps."""
        return _median(statistics.fmean(sum(step.exposed_s.values()) for step in steps) for steps in self.rounds)

    @property
    def validation_sets(self) -> list[str]:
        """Names of the additional validation sets, in the order of their first losses."""
        return list(dict.fromkeys(name for each in self.evaluations for name in each.named))

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of rank 0, activations included; None if the run did not measure it."""
        found = self.summary.get("memory_peak")
        return found["bytes"] if isinstance(found, Mapping) and isinstance(found.get("bytes"), int) else None

    def setting(self, name: str, default: Any = None) -> Any:
        """Return the setting with a dotted name such as ``link.bandwidth``."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part, default) if isinstance(value, Mapping) else default
        return value


def read_run(folder: str | Path, held: frozenset[tuple[int, int, int]] | None = None) -> RunResult:
    """Read a run folder; never raises, whatever the folder contains.

    Args:
        held: the result of `locks_held`, to read it only once for many folders.
    """
    folder = Path(folder)
    problems: list[str] = []
    raw = _read_config(folder / CONFIG, problems)
    config = as_resolved(raw)
    log = read_log(folder / METRICS)
    problems += [log.problem] if log.problem else []
    summary = read_object(folder / SUMMARY, problems)
    damaged = bool(problems) or not config
    if not config and not problems:
        problems.append(f"there is no {CONFIG}: no run has begun here")
    if log.torn:
        problems.append(f"{METRICS}: the last line is half-written")
    running = is_held(folder / LOCK, locks_held() if held is None else held)
    return RunResult(
        folder=folder,
        state=_state(summary, running=running, damaged=damaged),
        config=config,
        start=log.start,
        steps=tuple(log.steps[step] for step in sorted(log.steps)),
        evaluations=tuple(log.evaluations[step] for step in sorted(log.evaluations)),
        summary=summary,
        link=_link(log.start.get("link") or summary.get("link"), problems),
        problems=tuple(problems),
        begun=log.begun,
        last_at=log.last_at,
        given={name: value for name, value in raw.items() if name != RESOLVED},
    )


def find_runs(root: str | Path) -> list[Path]:
    """Folders at or below ``root`` that contain a run, or the remains of one, in order of name.

    Folders that we have no permission to list are included, because leaving them out could hide a run; `read_run`
    reports the problem.
    """
    root = Path(root)
    found = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            found.append(Path(error.filename))

    for folder, inner, names in os.walk(root, onerror=note):
        if {CONFIG, METRICS, SUMMARY, LOCK} & set(names):
            found.append(Path(folder))
            inner.clear()  # folders below belong to this run
    return sorted(found)


def locks_held() -> frozenset[tuple[int, int, int]]:
    """Files that a process of this host has locked, as (major, minor, inode); empty if the kernel does not list them.

    We read the kernel's list and do not try to take the lock: a run that starts at that moment would be refused.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    found = set()
    for words in (line.split() for line in lines):
        if "FLOCK" in words and "->" not in words:  # an arrow marks a process that waits for the lock
            major, minor, inode = words[-3].split(":")
            found.add((int(major, 16), int(minor, 16), int(inode)))
    return frozenset(found)


def is_held(path: Path, held: frozenset[tuple[int, int, int]]) -> bool:
    """Whether the lock file at ``path`` is among the locked files ``held``."""
    try:
        facts = path.stat()
    except OSError:
        return False
    return (os.major(facts.st_dev), os.minor(facts.st_dev), facts.st_ino) in held


def _state(summary: Mapping[str, Any], *, running: bool, damaged: bool) -> State:
    if running:
        return "running"
    if damaged:
        return "damaged"
    if not summary:
        return "unfinished"
    return "done" if summary.get("status") == "ok" else "failed"


def _read_config(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return toml_of(masked(read_text(path)))  # earlier versions wrote secrets
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: {why_unread(error)}")
        return {}


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file. Empty if there is no file, or if it cannot be read, which adds to ``problems``."""
    try:
        found = json_of(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {why_unread(error)}")
        return {}
    if isinstance(found, dict):
        return found
    problems.append(f"{path.name}: is not an object")
    return {}


def _link(found: Any, problems: list[str]) -> LinkFacts | None:
    if not found:
        return None
    try:
        return LinkFacts(
            mode=str(found["mode"]),
            achieved_bytes_per_s=number_of(found["achieved_bytes_per_s"]),
            achieved_latency_s=number_of(found["achieved_latency_s"]),
            comparable=bool(found["comparable"]),
            why_not_comparable=str(found["why_not_comparable"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        problems.append(f"{METRICS}: the link's facts cannot be read ({type(error).__name__}: {error})")
        return None


def _rate(steps: Sequence[StepRecord]) -> float:
    """Tokens per second over several steps together, from the rate of each step."""
    if len(steps) == 1:
        return steps[0].tokens_per_s
    return sum(step.tokens_per_s * step.step_s for step in steps) / sum(step.step_s for step in steps)


def _median(values: Iterable[float]) -> float:
    found = spread(values)
    return math.nan if found is None else found.median
