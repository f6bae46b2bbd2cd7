"""What a run tells about itself, as facts, and who listens: the console, ``metrics.jsonl``, ``summary.json``.

The loop makes one `StepRecord` a step and hands it to its observers; it knows none of them. Whoever builds
the observers builds them on rank 0 alone. JSON has no NaN and no infinity: they are written as null, so that
every line of ``metrics.jsonl`` is valid JSON whatever the run came to.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zeroshard.comm import by_kind
from zeroshard.regular_files import LOG_BYTES, open_regular, read_bytes

GIB = 2**30
LINES_OF_THEIR_OWN = ("plan",)  # of what is said at the start


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: counted from 1, after the update.
        loss: mean over the global batch, in nats per token.
        grad_norm: global, over all ranks, before clipping; infinite where a gradient is not finite.
        lr: of this step.
        step_s: wall time.
        tokens: of the global batch, all ranks together, since the run began.
        tokens_per_s: all ranks together.
        mfu: share of the devices' peak that the model's own arithmetic used; None where the peak is not
            known.
        memory_bytes: of this rank, by category ("params", "grads", "optimizer", ...); empty where not
            measured.
        comm: of this rank in this step, by operation; empty where not observed.
        skipped: whether no rank took the step: see `zeroshard.train.loop.step_guard`.
        why_skipped: ``"overflow"`` (of float16 on some rank), ``"not finite"`` or ``"spike"``; empty where taken.
        num_skipped: steps skipped since the run began.
        loss_scale: of this step; None where the loss is not scaled.
        exposed_s: seconds that this rank's computation stood still for communication, by unit, what was sent and
            phase ("blocks.3/weights/backward", ..., "control"); empty where not observed. On CUDA what the device has
            not reached yet is in the next step's.
        spans_s: seconds of this rank's step by part: "data", "forward", "backward", "clip", "update"; on CUDA as
            ``exposed_s``.
        hfu: as ``mfu``, with what activation checkpointing computes again; None where it is the same, or unknown.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens: int
    tokens_per_s: float
    mfu: float | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    comm: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False
    why_skipped: str = ""
    num_skipped: int = 0
    loss_scale: float | None = None
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    spans_s: Mapping[str, float] = field(default_factory=dict)
    hfu: float | None = None


class Observer(Protocol):
    """Told of everything that a run does, in order; `close` comes last and always."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins or goes on; `info` holds what is fixed during it."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""
        ...

    def on_eval(self, step: int, loss: float, ema_loss: float | None = None) -> None:
        """The validation loss after `step`, in nats per token; that of the moving average, where one is kept."""
        ...

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """A checkpoint is being written: so much of this rank's part is."""
        ...

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """A checkpoint of `step` is complete; `facts`: bytes and seconds."""
        ...

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """A checkpoint of `step` could not be written, and the run goes on."""
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""
        ...

    def close(self) -> None:
        """Let go of files and the terminal; may be called twice."""
        ...


class JsonlWriter:
    """``metrics.jsonl``: one object a line, written at once, appended to where a run goes on.

    A log that cannot be written ends no run: the first lost line is told on stderr, and the number of them when lines
    can be written again. There is never a part of a line. Where the file was removed, it is made anew.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(path)
        self._path, self._num_lost = path, 0
        self._file = _for_appending(path)

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Write a ``start`` line."""
        self._write("start", info)

    def on_step(self, record: StepRecord) -> None:
        """Write a ``step`` line; exposed communication by kind, all units together."""
        self._write("step", asdict(record) | {"exposed_s": by_kind(record.exposed_s)})

    def on_eval(self, step: int, loss: float, ema_loss: float | None = None) -> None:
        """Write an ``eval`` line."""
        average = {} if ema_loss is None else {"ema_loss": ema_loss}
        self._write("eval", {"step": step, "loss": loss, **average})

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """Nothing: the log has what came of it."""

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Write a ``checkpoint`` line."""
        self._write("checkpoint", {"step": step, "path": str(path), **(facts or {})})

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """Write a ``checkpoint`` line with an ``error`` in it."""
        self._write("checkpoint", {"step": step, "path": str(path), "error": error})

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write an ``end`` line."""
        self._write("end", summary)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: str, values: Mapping[str, Any]) -> None:
        line = json.dumps(finite_or_null({"event": event, **values}), allow_nan=False).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            self._num_lost += 1
            if self._num_lost == 1:
                _warn(f"{self._path} cannot be written ({error.strerror}); the run goes on without its log")
        else:
            if self._num_lost:
                _warn(f"{self._path} is written again; {self._num_lost} lines are missing in it")
            self._num_lost = 0

    def _append(self, line: bytes) -> None:
        """Write a whole line or nothing."""
        if not os.fstat(self._file.fileno()).st_nlink:  # removed in mid-run
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file.close()
            self._file = _for_appending(self._path)
        before, written = os.fstat(self._file.fileno()).st_size, 0
        try:
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
        except OSError:
            os.ftruncate(self._file.fileno(), before)
            raise


class SummaryWriter:
    """``summary.json``: what came out, written when the run is done."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._exposed_s: defaultdict[str, float] = defaultdict(float)
        self._num_steps = 0

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Nothing yet."""

    def on_step(self, record: StepRecord) -> None:
        """Add up the communication that nothing hid; the first step, which warms up, is left out."""
        for label, seconds in record.exposed_s.items() if self._num_steps else ():
            self._exposed_s[label] += seconds
        self._num_steps += 1

    def on_eval(self, step: int, loss: float, ema_loss: float | None = None) -> None:
        """Nothing yet."""

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """Nothing yet."""

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Nothing yet."""

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """Nothing yet."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write the file whole, or leave the old one; with the exposed seconds a step, by unit, kind and phase."""
        largest_first = sorted(self._exposed_s.items(), key=lambda item: -item[1])
        exposed = {label: seconds / (self._num_steps - 1) for label, seconds in largest_first}
        whole = {**summary, "exposed_s_per_step": exposed}
        text = json.dumps(finite_or_null(whole), indent=2, allow_nan=False) + "\n"
        unfinished = self._path.with_suffix(".tmp")
        try:
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            _warn(f"{self._path} cannot be written ({error.strerror})")

    def close(self) -> None:
        """Nothing is held."""


class _Console(Console):
    """rich's, which ends the process where nobody reads it; this one raises."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleRecorder:
    """A progress bar on a terminal; elsewhere one plain line every `log_interval` steps.

    Where nothing can be written any more, as into ``| head``, it says so once on stderr, and the run goes on.
    """

    def __init__(self, max_steps: int, log_interval: int = 10, stream: TextIO | None = None) -> None:
        self._max_steps, self._log_interval = max_steps, log_interval
        self._console = _Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._gone = False
        self._bar = _progress(self._console) if self._console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("train", total=max_steps, facts="")
        self._saving: TaskID | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Print what is fixed during the run, in one line, and each table in a line of its own."""
        tables = {name: value for name, value in info.items() if isinstance(value, Mapping)}
        lines = {name: str(value) for name, value in info.items() if name in LINES_OF_THEIR_OWN}
        rest = {name: value for name, value in info.items() if name not in tables and name not in lines}
        self._print("  ".join(f"{name} {_short(value)}" for name, value in rest.items()))
        for name, line in lines.items():
            self._print(f"{name}  {line}")
        for name, table in tables.items():
            if table:
                self._print(f"{name}  " + "  ".join(f"{key}: {_short(value)}" for key, value in table.items()))
        if self._bar is not None:
            self._bar.start()

    def on_step(self, record: StepRecord) -> None:
        """Move the bar, or print a line at the first, the last and every `log_interval`-th step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=record.step, facts=facts_of(record))
        elif record.step in (1, self._max_steps) or record.step % self._log_interval == 0:
            self._print(f"step {record.step}  {facts_of(record)}")

    def on_eval(self, step: int, loss: float, ema_loss: float | None = None) -> None:
        """Print the validation loss."""
        average = "" if ema_loss is None else f"  ema_val_loss {ema_loss:.4f}"
        self._print(f"step {step}  val_loss {loss:.4f}{average}")

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """Move the checkpoint's own bar, which is there while one is written."""
        if self._bar is None:
            return
        if self._saving is None:
            self._saving = self._bar.add_task("checkpoint", total=num_bytes, facts="writing a checkpoint")
        self._bar.update(self._saving, completed=done_bytes, total=num_bytes)

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Print where the checkpoint lies."""
        self._saving_ends()
        self._print(f"step {step}  checkpoint {path}")

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """Take the bar away; what went wrong is said on stderr."""
        self._saving_ends()

    def _saving_ends(self) -> None:
        if self._bar is not None and self._saving is not None:
            self._bar.remove_task(self._saving)
            self._saving = None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Print what came out, in one line; tables stay in ``summary.json``."""
        flat = {name: value for name, value in summary.items() if not isinstance(value, Mapping)}
        self.close()
        self._print("  ".join(f"{name} {_short(value)}" for name, value in flat.items()))

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str) -> None:
        if self._gone:
            return
        try:
            self._console.print(line, markup=False)
            self._console.file.flush()
        except OSError as error:
            self._gone = True
            _warn(f"the console cannot be written ({error.strerror}); the run goes on, and its folder has the rest")
            if self._console.file is sys.stdout:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())  # for what is buffered still


def facts_of(record: StepRecord) -> str:
    """One step in words: ``loss 4.1234  grad_norm 0.98  lr 3.0e-04  12,345 tok/s  mfu 41.2%  mem 10.1GiB  comm 3%``.

    `mfu`, the loss's scale, memory and the share of the step that waited for communication are said only where they
    are known.
    """
    facts = [
        f"loss {record.loss:.4f}",
        f"grad_norm {record.grad_norm:.2f}",
        f"lr {record.lr:.1e}",
        f"{record.tokens_per_s:,.0f} tok/s",
    ]
    if record.mfu is not None:
        facts.append(f"mfu {record.mfu:.1%}")
    if record.hfu is not None:
        facts.append(f"hfu {record.hfu:.1%}")
    if record.loss_scale is not None:
        facts.append(f"scale {record.loss_scale:g}")
    if record.loss_scale is not None or record.num_skipped:
        facts.append(f"skipped {record.num_skipped}")
    if record.memory_bytes:
        facts.append(f"mem {bytes_in_words(sum(record.memory_bytes.values()))}")
    if record.exposed_s:
        facts.append(f"comm {sum(record.exposed_s.values()) / record.step_s:.0%}")
    return "  ".join(facts)


def bytes_in_words(num_bytes: int) -> str:
    """``10.1GiB``, ``12.3MiB``, ``4.0KiB`` or ``12B``."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}{unit}"
    return f"{num_bytes}B"


def finite_or_null(value: Any) -> Any:
    """`value` with every NaN and infinity in it, however deep, replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite_or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(item) for item in value]
    return value


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)


def _drop_torn_line(path: Path) -> None:
    """A process that was killed in the middle of a line leaves a piece of one: cut it off."""
    if not path.exists():
        return
    whole = read_bytes(path, LOG_BYTES)
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)


def _for_appending(path: Path) -> FileIO:
    return FileIO(path, "ab", opener=open_regular)


def _progress(console: Console) -> Progress:
    return Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[facts]}", markup=False),
        TimeRemainingColumn(),
        console=console,
    )


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
