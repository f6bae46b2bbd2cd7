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

import json
import math
import os
import statistics
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zeroshard.train.lock import LOCK

State = Literal["done", "failed", "running", "unfinished", "damaged"]
CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
WARM_UP_STEPS = 2  # of a run, left out of its medians: the first allocates, the second still settles


@dataclass(frozen=True)
class Step:
    """One optimizer step, as `zeroshard.train.record.StepRecord` was written; NaN where the log has null.

    Attributes:
        exposed_s: seconds that rank 0 stood still for communication, by kind ("weights/forward", ...).
        comm_bytes: that rank 0 took part in moving, by operation.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens: int
    tokens_per_s: float
    mfu: float
    memory_bytes: Mapping[str, int]
    comm_bytes: Mapping[str, int]
    exposed_s: Mapping[str, float]
    spans_s: Mapping[str, float]
    skipped: bool


@dataclass(frozen=True)
class Evaluation:
    """Validation loss after a step, in nats per token; ``ema_loss``: of averaged weights, NaN where there are none."""

    step: int
    loss: float
    ema_loss: float


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

    @cached_property
    def settled(self) -> tuple[Step, ...]:
        """The steps without those that warm up, or all where there are no others."""
        return self.steps[WARM_UP_STEPS:] or self.steps

    @property
    def step_s(self) -> float:
        """The median step, in seconds; NaN without steps."""
        return _median(step.step_s for step in self.settled)

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together, at the median step; NaN without steps."""
        return _median(step.tokens_per_s for step in self.settled)

    @property
    def exposed_s(self) -> float:
        """Seconds of the median step that rank 0 stood still for communication; NaN without steps."""
        return _median(sum(step.exposed_s.values()) for step in self.settled)

    @property
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


def read_run(folder: str | Path, held: frozenset[tuple[int, int, int]] | None = None) -> RunResult:
    """What ``folder`` says; never fails, whatever is in it.

    Args:
        folder: of a run.
        held: `locks_held`, to ask only once for many folders.
    """
    folder = Path(folder)
    problems: list[str] = []
    config = _read_config(folder / CONFIG, problems)
    log = _Log(folder / METRICS, problems)
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
    )


def find_runs(root: str | Path) -> list[Path]:
    """Folders at or below ``root`` that hold a run, or what is left of one, in order of name."""
    root = Path(root)
    found = []
    for folder, inner, names in os.walk(root):
        if {CONFIG, METRICS, SUMMARY, LOCK} & set(names):
            found.append(Path(folder))
            inner.clear()  # what a run keeps below is its own
    return sorted(found)


def read_runs(root: str | Path) -> list[RunResult]:
    """Every run at or below ``root``."""
    held = locks_held()
    return [read_run(folder, held) for folder in find_runs(root)]


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
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {_why(error)}")
        return {}


def read_object(path: Path, problems: list[str]) -> dict[str, Any]:
    """The JSON object in a file; empty where there is none, or where it cannot be read, which is a problem."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name}: {_why(error)}")
        return {}
    if isinstance(found, dict):
        return found
    problems.append(f"{path.name}: is not an object")
    return {}


class _Log:
    """``metrics.jsonl``, line by line.

    Attributes:
        torn: whether the last line is a piece of one, as a run leaves it that was killed while it wrote.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.start: dict[str, Any] = {}
        self.steps: dict[int, Step] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.torn = False
        try:
            *lines, rest = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            problems.append(f"{path.name}: {_why(error)}")
            return
        self.torn = bool(rest)
        bad = [number for number, line in enumerate(lines, 1) if not self._take(line)]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            problems.append(f"{path.name}: line {bad[0]}{more} cannot be read")

    def _take(self, line: bytes) -> bool:
        """Take what a line says; whether it could be read."""
        try:
            entry = json.loads(line)
            match entry["event"]:
                case "start":
                    self.start, step = entry, int(entry.get("step", 0))
                    # a run that goes on from an earlier step has left the later ones behind
                    self.steps = {number: each for number, each in self.steps.items() if number <= step}
                    self.evaluations = {number: each for number, each in self.evaluations.items() if number <= step}
                case "step":
                    self.steps[int(entry["step"])] = _step(entry)
                case "eval":
                    self.evaluations[int(entry["step"])] = _evaluation(entry)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True


def _step(entry: Mapping[str, Any]) -> Step:
    return Step(
        step=int(entry["step"]),
        loss=_number(entry["loss"]),
        grad_norm=_number(entry["grad_norm"]),
        lr=_number(entry["lr"]),
        step_s=_number(entry["step_s"]),
        tokens=int(entry["tokens"]),
        tokens_per_s=_number(entry["tokens_per_s"]),
        mfu=_number(entry.get("mfu")),
        memory_bytes=dict(entry.get("memory_bytes") or {}),
        comm_bytes=dict(entry.get("comm") or {}),
        exposed_s=dict(entry.get("exposed_s") or {}),
        spans_s=dict(entry.get("spans_s") or {}),
        skipped=bool(entry.get("skipped")),
    )


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    return Evaluation(int(entry["step"]), _number(entry["loss"]), _number(entry.get("ema_loss")))


def _link(found: Any, problems: list[str]) -> LinkFacts | None:
    if not found:
        return None
    try:
        asked = found["asked_bytes_per_s"]
        return LinkFacts(
            mode=str(found["mode"]),
            node_size=int(found["node_size"]),
            asked_bytes_per_s=math.inf if asked is None else float(asked),
            achieved_bytes_per_s=_number(found["achieved_bytes_per_s"]),
            asked_latency_s=_number(found["asked_latency_s"]),
            achieved_latency_s=_number(found["achieved_latency_s"]),
            comparable=bool(found["comparable"]),
            why_not_comparable=str(found["why_not_comparable"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        problems.append(f"{METRICS}: the link's facts cannot be read ({type(error).__name__}: {error})")
        return None


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _median(values: Iterable[float]) -> float:
    found = spread(values)
    return math.nan if found is None else found.median


def _why(error: Exception) -> str:
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"does not parse ({error})"
