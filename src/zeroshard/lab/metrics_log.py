"""Reads ``metrics.jsonl`` incrementally: each read parses only the lines that were appended since the last one.

That matters because a log may grow by thousands of lines an hour. A run only appends to its log. If the file was
truncated, replaced or rewritten nevertheless, it is read again from its beginning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zeroshard.regular_files import json_of, open_binary

NAMED = "val_loss/"  # prefix of the losses of additional validation sets, by name
_NUMBERS = frozenset((int, float, bool))


@dataclass(frozen=True)
class Step:
    """One optimizer step, as `zeroshard.train.records.records.StepRecord` was written; NaN if the log has null.

    Attributes:
        exposed_s: seconds for which rank 0 waited for communication, by kind ("weights/forward", ...).
        comm_bytes: bytes of the collectives that rank 0 took part in, by operation.
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
    """Validation loss after a step, in nats per token.

    Attributes:
        ema_loss: loss of the averaged weights; NaN if the run keeps no average.
        named: losses on additional validation sets, by name.
    """

    step: int
    loss: float
    ema_loss: float
    named: Mapping[str, float] = field(default_factory=dict)


class MetricsLog:
    """The contents of a log so far; `read` adds the lines that are new.

    Attributes:
        start: the last ``start`` event.
        steps, evaluations: records by step number.
        checkpoints: the log entry of each save, including failed ones (which have ``error``), by step number.
        begun, last_at: time of day of the first and of the last event, as ISO 8601; empty if the log has no times.
        torn: whether the last line is incomplete, as it is if the run was killed while it wrote.
        problem: which lines cannot be parsed, or why the file cannot be read; empty if there is no problem.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.start: dict[str, Any] = {}
        self.steps: dict[int, Step] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.begun = self.last_at = ""
        self.torn, self.problem = False, ""
        self._file_id: tuple[int, int] | None = None
        self._offset, self._num_lines = 0, 0  # of the complete lines that were read
        self._last_line = b""
        self._bad: list[int] = []

    def read(self) -> None:
        """Parse the lines that were appended since the last call, or all lines if the file has been replaced."""
        self.torn, self.problem = False, ""
        try:
            with open_binary(self._path) as file:
                self._read_on(file)
        except FileNotFoundError:
            self._forget()
            return
        except OSError as error:
            self._forget()
            self.problem = f"{self._path.name}: {why_unread(error)}"
            return
        if self._bad:
            more = f" and {len(self._bad) - 1} more" if len(self._bad) > 1 else ""
            self.problem = f"{self._path.name}: line {self._bad[0]}{more} cannot be read"

    def _read_on(self, file: BinaryIO) -> None:
        facts = os.fstat(file.fileno())
        file_id = (facts.st_dev, facts.st_ino)
        file.seek(max(self._offset - len(self._last_line), 0))
        if file_id != self._file_id or file.read(len(self._last_line)) != self._last_line:
            self._forget()
            self._file_id = file_id
            file.seek(0)
        self._take_appended(file)

    def _take_appended(self, file: BinaryIO) -> None:
        """Parse the lines of ``file`` from its current position on."""
        for line in file:
            if not line.endswith(b"\n"):
                self.torn = True
                break
            self._take_whole(line)

    def _take_whole(self, line: bytes) -> None:
        """Parse and count a line that includes its newline."""
        self._pass(line, 1)
        if not self._take(line):
            self._bad.append(self._num_lines)

    def _pass(self, lines: bytes, count: int) -> None:
        """Move the position past ``lines``, which are ``count`` lines."""
        self._num_lines += count
        self._offset += len(lines)
        self._last_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]

    def _take(self, line: bytes) -> bool:
        """Parse a line and store its event; returns whether it could be parsed."""
        try:
            entry = json_of(line)
            if isinstance(time := entry.get("time"), str):
                self.begun, self.last_at = self.begun or time, time
            match entry["event"]:
                case "start":
                    self.start, step = entry, int(entry.get("step", 0))
                    # a run that resumed from an earlier step has discarded the later ones
                    self.steps = {number: each for number, each in self.steps.items() if number <= step}
                    self.evaluations = {number: each for number, each in self.evaluations.items() if number <= step}
                case "step":
                    self.steps[int(entry["step"])] = _step(entry)
                case "eval":
                    self.evaluations[int(entry["step"])] = _evaluation(entry)
                case "checkpoint":
                    self.checkpoints[int(entry["step"])] = entry
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return False
        return True


def _step(entry: Mapping[str, Any]) -> Step:
    return Step(
        step=int(entry["step"]),
        loss=number_of(entry["loss"]),
        grad_norm=number_of(entry["grad_norm"]),
        lr=number_of(entry["lr"]),
        step_s=number_of(entry["step_s"]),
        tokens=int(entry["tokens"]),
        tokens_per_s=number_of(entry["tokens_per_s"]),
        mfu=number_of(entry.get("mfu")),
        memory_bytes=_numbers(entry.get("memory_bytes")),
        comm_bytes=_numbers(entry.get("comm")),
        exposed_s=_numbers(entry.get("exposed_s")),
        spans_s=_numbers(entry.get("spans_s")),
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
