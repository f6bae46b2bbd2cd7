"""Reads ``metrics.jsonl``: the events of a run, as far as they can be read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import json_of, open_binary
from zeroshard.train.records.records import StepRecord

NAMED = "val_loss/"  # prefix of the losses of additional validation sets, by name
_NUMBERS = frozenset((int, float, bool))


@dataclass(frozen=True)
class Evaluation:
    """Validation loss after a step, in nats per token."""

    step: int
    loss: float
    ema_loss: float  # loss of the averaged weights; NaN if the run keeps no average
    named: Mapping[str, float] = field(default_factory=dict)  # losses on additional validation sets, by name


@dataclass
class MetricsLog:
    """The contents of a log."""

    start: dict[str, Any] = field(default_factory=dict)  # the last ``start`` event
    # steps, evaluations: records by step number. A number that the log has as null is NaN. Of a step's ``exposed_s``
    # the log has the sums over units, by kind (``weights/forward``, ...).
    steps: dict[int, StepRecord] = field(default_factory=dict)
    evaluations: dict[int, Evaluation] = field(default_factory=dict)
    # begun, last_at: time of day of the first and of the last event, as ISO 8601; empty if the log has no times
    begun: str = ""
    last_at: str = ""
    torn: bool = False  # whether the last line is incomplete, as it is if the run was killed while it wrote
    problem: str = ""  # which lines cannot be parsed, or why the file cannot be read; empty if there is no problem

    def add_line(self, line: bytes) -> bool:
        """Parse a line and store its event; returns whether it could be parsed."""
        try:
            entry = json_of(line)
            if isinstance(time := entry.get("time"), str):
                self.begun, self.last_at = self.begun or time, time
            match entry["event"]:
                case "start":
                    self.start = json_of(masked(line.decode()))  # earlier versions wrote secrets
                    step = int(entry.get("step", 0))
                    # a run that resumed from an earlier step has discarded the later ones
                    self.steps = {number: each for number, each in self.steps.items() if number <= step}
                    self.evaluations = {number: each for number, each in self.evaluations.items() if number <= step}
                case "step":
                    self.steps[int(entry["step"])] = _step(entry)
                case "eval":
                    self.evaluations[int(entry["step"])] = _evaluation(entry)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return False
        return True


def read_log(path: Path) -> MetricsLog:
    """Read the log at ``path``; empty if there is none. Never raises: ``problem`` says what cannot be read."""
    log = MetricsLog()
    bad = []
    try:
        with open_binary(path) as file:
            for number, line in enumerate(file, start=1):
                log.torn = not line.endswith(b"\n")
                if not log.torn and not log.add_line(line):
                    bad.append(number)
    except FileNotFoundError:
        return log
    except OSError as error:
        return MetricsLog(problem=f"{path.name}: {why_unread(error)}")
    if bad:
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        log.problem = f"{path.name}: line {bad[0]}{more} cannot be read"
    return log


def _step(entry: Mapping[str, Any]) -> StepRecord:
    return StepRecord(
        step=int(entry["step"]),
        loss=number_of(entry["loss"]),
        grad_norm=number_of(entry["grad_norm"]),
        lr=number_of(entry["lr"]),
        step_s=number_of(entry["step_s"]),
        tokens=int(entry["tokens"]),
        tokens_per_s=number_of(entry["tokens_per_s"]),
        mfu=None if entry.get("mfu") is None else float(entry["mfu"]),
        memory_bytes=_numbers(entry.get("memory_bytes")),
        exposed_s=_numbers(entry.get("exposed_s")),
        skipped=bool(entry.get("skipped")),
    )


def _evaluation(entry: Mapping[str, Any]) -> Evaluation:
    named = {key.removeprefix(NAMED): number_of(value) for key, value in entry.items() if key.startswith(NAMED)}
    return Evaluation(int(entry["step"]), number_of(entry["loss"]), number_of(entry.get("ema_loss")), named)


def _numbers(found: Any) -> dict[str, Any]:
    """A dict of numbers by name; raises TypeError if a value is not a number."""
    numbers = dict(found or {})
    if not _NUMBERS.issuperset(map(type, numbers.values())):
        raise TypeError("not numbers alone")
    return numbers


def number_of(value: Any) -> float:
    """The logged number as a float; NaN for null."""
    return math.nan if value is None else float(value)


def why_unread(error: Exception) -> str:
    """A phrase that says why a file cannot be read."""
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"does not parse ({error})"
