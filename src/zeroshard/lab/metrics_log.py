"""``metrics.jsonl`` as facts, read on from where it was read before: a log may grow by thousands of lines an hour.

A log is only ever appended to. Where it was cut off, replaced or written anew all the same, it is read from its
beginning.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from zeroshard.regular_files import json_of, open_binary

NAMED = "val_loss/"  # before the name of a further validation set
_NUMBERS = frozenset((int, float, bool))


@dataclass(frozen=True)
class Step:
    """One optimizer step, as `zeroshard.train.records.records.StepRecord` was written; NaN where the log has null.

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
    """Validation loss after a step, in nats per token.

    Attributes:
        ema_loss: of averaged weights; NaN where there are none.
        named: of further validation sets, by name.
    """

    step: int
    loss: float
    ema_loss: float
    named: Mapping[str, float] = field(default_factory=dict)


class MetricsLog:
    """What a log has said so far; `read` takes what is new.

    Attributes:
        start: the last ``start`` event.
        steps, evaluations: by number of the step.
        checkpoints: facts of each that was saved, or failed to be (``error``), by number of the step.
        torn: whether the last line is a piece of one, as a run leaves it that was killed while it wrote.
        problem: what cannot be read of it; empty where all can.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self.start: dict[str, Any] = {}
        self.steps: dict[int, Step] = {}
        self.evaluations: dict[int, Evaluation] = {}
        self.checkpoints: dict[int, dict[str, Any]] = {}
        self.torn, self.problem = False, ""
        self._file_id: tuple[int, int] | None = None
        self._offset, self._num_lines = 0, 0  # of whole lines that were taken
        self._last_line = b""
        self._bad: list[int] = []

    def read(self) -> None:
        """Take the lines that were appended since, or all where the file is another one now."""
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
        """Take what ``file`` has from its place on."""
        for line in file:
            if not line.endswith(b"\n"):
                self.torn = True
                break
            self._take_whole(line)

    def _take_whole(self, line: bytes) -> None:
        """Take a line with its end, and count it."""
        self._pass(line, 1)
        if not self._take(line):
            self._bad.append(self._num_lines)

    def _pass(self, lines: bytes, count: int) -> None:
        """Go on behind ``lines``, which are as many."""
        self._num_lines += count
        self._offset += len(lines)
        self._last_line = lines[lines.rfind(b"\n", 0, -1) + 1 :]

    def _take(self, line: bytes) -> bool:
        """Take what a line says; whether it could be read."""
        try:
            entry = json_of(line)
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
    """Numbers by name; TypeError where anything else stands there."""
    numbers = dict(found or {})
    if not _NUMBERS.issuperset(map(type, numbers.values())):
        raise TypeError("not numbers alone")
    return numbers


def number_of(value: Any) -> float:
    """A number as it was written; NaN for null."""
    return math.nan if value is None else float(value)


def why_unread(error: Exception) -> str:
    """Why a file cannot be read, in words."""
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else f"does not parse ({error})"
