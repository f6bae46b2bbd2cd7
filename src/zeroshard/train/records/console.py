"""What a run says on the terminal: a progress bar, or plain lines where there is none."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zeroshard.train.records.records import StepRecord, warn

GIB = 2**30
LINES_OF_THEIR_OWN = ("plan",)  # of what is said at the start


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
            warn(f"the console cannot be written ({error.strerror}); the run goes on, and its folder has the rest")
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
