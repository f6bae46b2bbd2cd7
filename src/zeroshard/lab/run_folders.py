"""Run folders as facts: the one reader of ``config.toml``, ``metrics.jsonl`` and ``summary.json``.

A folder may be of a run that is under way, was killed, or was damaged since. None of that is an error here: what can
be read is, what cannot is a line in ``problems``, and ``state`` says what the folder is worth:

    done         the run has ended well
    failed       it has ended otherwise, and says so
    running      somebody holds the folder
    unfinished   nobody does, and it has not ended: killed, or the machine went down
    damaged      something in it cannot be read
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zeroshard.lab.metrics_log import Evaluation, MetricsLog, Step, number_of, why_unread
from zeroshard.regular_files import json_of, read_text, toml_of
from zeroshard.train.state.lock import LOCK

State = Literal["done", "failed", "running", "unfinished", "damaged"]
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
WARM_UP_STEPS = 2  # of a run, left out of its medians: the first allocates, the second still settles


@dataclass(frozen=True)
class LinkFacts:
    """The link that a run asked for, and what its probe found; infinite bandwidth: as the network is."""

    mode: str
    node_size: int
    asked_bytes_per_s: float
    achieved_bytes_per_s: float
    asked_latency_s: float
    achieved_latency_s: float
    comparable: bool
    why_not_comparable: str


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @property
    def relative(self) -> float:
        """From the lowest to the highest, as a share of the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def spread(values: Iterable[float]) -> Spread | None:
    """The spread of those that are finite; None where none is."""
    finite = [value for value in values if math.isfinite(value)]
    return Spread(statistics.median(finite), min(finite), max(finite), len(finite)) if finite else None


def scaled(found: Spread | None, scale: float) -> Spread | None:
    """In another unit."""
    return Spread(found.median * scale, found.low * scale, found.high * scale, found.count) if found else None


@dataclass(frozen=True)
class RunResult:
    """What a run folder says.

    Attributes:
        folder: of the run.
        state: see the module's docstring.
        config: nested, as in ``config.toml``; empty where that cannot be read.
        start: what the run said when it last began: world_size, tokens_per_step, num_params, ...
        steps: by number, each once: those taken again after a resume replace the earlier ones.
        evaluations: by step.
        summary: ``summary.json``; empty where there is none.
        link: None where no link was slowed.
        problems: what could not be read, a line each.
        checkpoints: what its log says of each, in order of steps.
    """

    folder: Path
    state: State
    config: Mapping[str, Any]
    start: Mapping[str, Any]
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    summary: Mapping[str, Any]
    link: LinkFacts | None
    problems: tuple[str, ...]
    checkpoints: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def settled(self) -> tuple[Step, ...]:
        """The steps without those that warm up, or all where there are no others."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @cached_property
    def rounds(self) -> tuple[tuple[Step, ...], ...]:
        """The settled steps by rounds, from one meeting of replicas to the next: each step is one where all ranks
        meet at each, and where not one round of local steps is whole.
        """
        every = self.setting("replicas.every", 1)
        every = every if isinstance(every, int) and 1 < every <= len(self.settled) else 1
        return tuple(self.settled[i : i + every] for i in range(0, len(self.settled) - every + 1, every))

    @cached_property
    def step_s(self) -> float:
        """The median step, in seconds; of local steps the median round's mean. NaN without steps."""
        return _median(statistics.fmean(step.step_s for step in steps) for steps in self.rounds)

    @cached_property
    def tokens_per_s(self) -> float:
        """Of all ranks together, at the median step or in the median round; NaN without steps."""
        return _median(_rate(steps) for steps in self.rounds)

    @cached_property
    def exposed_s(self) -> float:
        """Seconds of the median step that rank 0 stood still for communication; NaN without steps."""
        return _median(statistics.fmean(sum(step.exposed_s.values()) for step in steps) for steps in self.rounds)

    @cached_property
    def held_bytes(self) -> int:
        """The most that rank 0 held of training state, without activations."""
        return max((sum(step.memory_bytes.values()) for step in self.steps), default=0)

    @property
    def peak_bytes(self) -> int | None:
        """The most that rank 0 held of everything; None where the run did not look for it."""
        found = self.summary.get("memory_peak")
        return found["bytes"] if isinstance(found, Mapping) and isinstance(found.get("bytes"), int) else None

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting by its dotted name, as ``link.bandwidth``."""
        value: Any = self.config
        for part in name.split("."):
            value = value.get(part, default) if isinstance(value, Mapping) else default
        return value


def read_run(
    folder: str | Path, held: frozenset[tuple[int, int, int]] | None = None, log: MetricsLog | None = None
) -> RunResult:
    """What ``folder`` says; never fails, whatever is in it.

    Args:
        folder: of a run.
        held: `locks_held`, to ask only once for many folders.
        log: of the folder, from an earlier reading: lines that it has taken are not read again.
    """
    folder = Path(folder)
    problems: list[str] = []
    config = _read_config(folder / CONFIG, problems)
    log = MetricsLog(folder / METRICS) if log is None else log
    log.read()
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
        checkpoints=tuple(log.checkpoints[step] for step in sorted(log.checkpoints)),
    )


def validation_sets(run: RunResult) -> list[str]:
    """Names of the further validation sets that ``run`` was evaluated on, in the order of their first losses."""
    return list(dict.fromkeys(name for each in run.evaluations for name in each.named))


def find_runs(root: str | Path) -> list[Path]:
    """Folders at or below ``root`` that hold a run, or what is left of one, in order of name.

    A folder that may not be listed is among them: `read_run` says so, where to leave it out would hide a run.
    """
    root = Path(root)
    found = []

    def note(error: OSError) -> None:
        if isinstance(error, PermissionError):
            found.append(Path(error.filename))

    for folder, inner, names in os.walk(root, onerror=note):
        if {CONFIG, METRICS, SUMMARY, LOCK} & set(names):
            found.append(Path(folder))
            inner.clear()  # what a run keeps below is its own
    return sorted(found)


def locks_held() -> frozenset[tuple[int, int, int]]:
    """Files that some process of this host has locked, as (major, minor, inode); empty where the kernel does not say.

    It is read and not tried: a lock taken to look would turn away a run that begins at that moment.
    """
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return frozenset()
    found = set()
    for words in (line.split() for line in lines):
        if "FLOCK" in words and "->" not in words:  # an arrow: who waits
            major, minor, inode = words[-3].split(":")
            found.add((int(major, 16), int(minor, 16), int(inode)))
    return frozenset(found)


def is_held(path: Path, held: frozenset[tuple[int, int, int]]) -> bool:
    """Whether a lock file is among those that are held."""
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
        return toml_of(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: {why_unread(error)}")
        return {}


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or where it cannot be read, which is a problem."""
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
        asked = found["asked_bytes_per_s"]
        return LinkFacts(
            mode=str(found["mode"]),
            node_size=int(found["node_size"]),
            asked_bytes_per_s=math.inf if asked is None else float(asked),
            achieved_bytes_per_s=number_of(found["achieved_bytes_per_s"]),
            asked_latency_s=number_of(found["asked_latency_s"]),
            achieved_latency_s=number_of(found["achieved_latency_s"]),
            comparable=bool(found["comparable"]),
            why_not_comparable=str(found["why_not_comparable"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        problems.append(f"{METRICS}: the link's facts cannot be read ({type(error).__name__}: {error})")
        return None


def _rate(steps: Sequence[Step]) -> float:
    """Tokens a second over several steps, from those of each."""
    if len(steps) == 1:
        return steps[0].tokens_per_s
    return sum(step.tokens_per_s * step.step_s for step in steps) / sum(step.step_s for step in steps)


def _median(values: Iterable[float]) -> float:
    found = spread(values)
    return math.nan if found is None else found.median
