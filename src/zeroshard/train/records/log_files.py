"""The callback that writes ``metrics.jsonl`` (every event, with its time of day) and ``summary.json`` (the result).

JSON has no NaN and no infinity. They are written as null, so that both files are valid JSON even if a run diverges.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

from zeroshard.comm import by_kind
from zeroshard.host.errors import warn
from zeroshard.host.regular_files import LOG_BYTES, is_same, open_inside, read_bytes, write_inside
from zeroshard.train.records.records import Callback, StepRecord

METRICS, SUMMARY = "metrics.jsonl", "summary.json"


class LogFiles(Callback):
    """Writes ``metrics.jsonl``, one JSON object per line, at once (a resumed run appends), and ``summary.json``.

    A log that cannot be written does not stop a run: the first lost line is reported on stderr, and the number of lost
    lines once lines can be written again. A line is written completely or not at all. A log that was removed in mid-run
    is made again, with a warning.

    Args:
        clock: returns the time of day, which each line then has as ``time``; None: lines have no time.
        require_folder: raises OSError once the folder is another run's, whose summary is then left alone.
    """

    def __init__(
        self, folder: Path, clock: Callable[[], str] | None = None, require_folder: Callable[[], None] = lambda: None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path, self._summary, self._clock = folder / METRICS, folder / SUMMARY, clock
        self._require_folder = require_folder
        self._file = self._opened()
        self._num_lost = self._num_steps = 0
        self._exposed_s: defaultdict[str, float] = defaultdict(float)

    def _opened(self) -> FileIO:
        file = FileIO(open_inside(self._path.parent, METRICS, os.O_RDWR | os.O_APPEND | os.O_CREAT), "ab")
        # Cut off an incomplete last line, which a process leaves if it is killed while it writes.
        os.ftruncate(file.fileno(), read_bytes(self._path, LOG_BYTES, follow=False).rfind(b"\n") + 1)
        return file

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Write a ``start`` line."""
        self._write("start", info)

    def on_step(self, record: StepRecord) -> None:
        """Write a ``step`` line, in which exposed communication is summed over units, by kind."""
        for label, seconds in record.exposed_s.items() if self._num_steps else ():  # the first step warms up
            self._exposed_s[label] += seconds
        self._num_steps += 1
        values = asdict(record) | {"exposed_s": by_kind(record.exposed_s)}
        self._write("step", {name: value for name, value in values.items() if name != "outer_step" or value})

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """Write an ``eval`` line, in which ``val_loss`` and ``ema_val_loss`` are ``loss`` and ``ema_loss``."""
        names = {"val_loss": "loss", "ema_val_loss": "ema_loss"}
        self._write("eval", {"step": step, **{names.get(name, name): loss for name, loss in losses.items()}})

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write a ``checkpoint`` line."""
        self._write("checkpoint", {"step": step, "path": str(path), **(facts or {})})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write an ``end`` line, and replace ``summary.json`` atomically.

        That has the summary and exposed seconds per step, by unit, kind and phase, without the first step.
        """
        self._write("end", summary)
        largest_first = sorted(self._exposed_s.items(), key=lambda item: -item[1])
        exposed = {label: seconds / (self._num_steps - 1) for label, seconds in largest_first}
        text = json.dumps(finite_or_null({**summary, "exposed_s_per_step": exposed}), indent=2, allow_nan=False) + "\n"
        try:
            self._require_folder()
            write_inside(self._summary.parent, SUMMARY, text)
        except OSError as error:
            warn(f"{self._summary} cannot be written ({error.strerror or error})")

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        time = {"time": self._clock()} if self._clock else {}
        line = json.dumps(finite_or_null({"event": event, **time, **values}), allow_nan=False).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                warn(f"{self._path} cannot be written ({error.strerror or error}); the run continues without its log")
        else:
            if self._num_lost:
                warn(f"{self._path} is written again; {self._num_lost} lines are missing in it")
            self._num_lost = 0

    def _append(self, line: bytes) -> None:
        """Write a line completely, or raise OSError and leave the file as it was."""
        if not is_same(self._path, self._file.fileno()):
            self._require_folder()
            file = self._opened()
            self._file.close()
            self._file = file
            warn(f"{self._path} was removed or replaced while the run was writing there; it has the lines from here on")
        before, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise


def finite_or_null(value: Any) -> Any:
    """Return ``value`` with every NaN and infinity in it, at any depth, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value
