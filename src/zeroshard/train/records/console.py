"""Console output of a run: a description at the start, a line every `log_interval` steps, and a live progress bar.

If stdout is not a terminal, the lines are the same, without the bar. On a terminal no line is wider than the terminal:
values of a step that do not fit are left out, the loss and the speed last, and longer texts are wrapped.
"""

from __future__ import annotations

import errno
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column, Table
from rich.text import Text

from zeroshard.train.config.sizes import bandwidth_in_words, duration_in_words
from zeroshard.train.records.records import StepRecord, warn

GIB = 2**30
GAP = "  "  # between the values of a line
REFRESHES_PER_S = 4
# The first five values of a step's line are: step, loss, grad_norm, lr, tok/s; two of them have an index here.
NUM_MAIN_FACTS, GRAD_NORM_AT, LR_AT = 5, 2, 3


class _Console(Console):
    """rich's console, but it raises on a broken pipe; rich's own ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class ConsoleRecorder:
    """The observer that prints lines, one every `log_interval` steps, and on a terminal a progress bar below them.

    If stdout cannot be written any more, as after ``| head``, it warns once on stderr, and the run continues.

    Args:
        max_steps: number of steps of the run.
        log_interval: steps between lines.
        stream: where to print; None: stdout.
        next_command: what to do with a run that has ended well, named in its last line; empty: nothing.
    """

    def __init__(
        self, max_steps: int, log_interval: int = 10, stream: TextIO | None = None, next_command: str = ""
    ) -> None:
        self._max_steps, self._log_interval, self._next_command = max_steps, log_interval, next_command
        self._console = _Console(file=stream or sys.stdout, highlight=False, soft_wrap=True)
        self._gone = False
        self._bar = _Bar(self._console, max_steps) if self._console.is_terminal else None

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Print the description of the run, each line with a label and a text, then show the bar."""
        lines = start_lines(info)
        labels = max((len(name) for name, _ in lines), default=0)
        if self._bar is None:
            for name, text in lines:
                self._print(f"{name:<{labels}}{GAP}{text}")
            return
        table = Table.grid(Column(width=labels, no_wrap=True), Column(overflow="fold"), padding=(0, len(GAP), 0, 0))
        for name, text in lines:
            table.add_row(Text(name, "bold"), Text(text))
        self._print(table)
        # Reset, so that steps done before a resume do not count in the estimated speed.
        self._bar.reset(self._bar.run, completed=int(info.get("step", 0)))
        self._bar.start()

    def on_step(self, record: StepRecord) -> None:
        """Move the bar; print a line at the first, the last and every `log_interval`-th step."""
        if self._bar is not None:
            facts = f"{record.tokens_per_s:,.0f} tok/s{GAP}loss {record.loss:.4f}"
            self._bar.update(self._bar.run, completed=record.step, facts=facts)
        if record.step in (1, self._max_steps) or record.step % self._log_interval == 0:
            facts = [f"step {record.step}", *facts_of(record)]
            for place in (-1,) * (len(facts) - NUM_MAIN_FACTS) + (LR_AT, GRAD_NORM_AT):
                if self._bar is not None and len(GAP.join(facts)) > self._console.width:
                    facts.pop(place)
            self._print(GAP.join(facts))

    def on_eval(
        self, step: int, loss: float, ema_loss: float | None = None, named: Mapping[str, float] | None = None
    ) -> None:
        """Print the validation loss."""
        average = [] if ema_loss is None else [f"ema_val_loss {ema_loss:.4f}"]
        more = [f"val_loss/{name} {value:.4f}" for name, value in (named or {}).items()]
        facts = [f"step {step}", f"val_loss {loss:.4f}", *average, *more]
        self._print(GAP.join(facts if self._bar is None else _fitting(facts, self._console.width)))

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """Show in the bar the share of the checkpoint that is written, in place of the remaining time."""
        if self._bar is not None:
            self._bar.update(self._bar.run, saved=done_bytes / num_bytes if num_bytes else 1.0)

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Print the checkpoint's path, or only its name if the path does not fit on the terminal."""
        line = f"step {step}{GAP}checkpoint {path}"
        if self._bar is not None:
            self._bar.update(self._bar.run, saved=None)
            line = line if len(line) <= self._console.width else f"step {step}{GAP}checkpoint {path.name}"
        self._print(line)

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """Show the remaining time in the bar again; `Saving` reports the error on stderr."""
        if self._bar is not None:
            self._bar.update(self._bar.run, saved=None)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Print the summary in one line, wrapped between values on a terminal; tables are only in ``summary.json``."""
        facts = [f"{name} {in_short(value)}" for name, value in summary.items() if not isinstance(value, Mapping)]
        if self._next_command and summary.get("status") == "ok":
            facts.append(f"next: {self._next_command}")
        self.close()
        while facts:
            fitting = facts if self._bar is None else _fitting(facts, self._console.width)
            self._print(GAP.join(fitting))
            facts = facts[len(fitting) :]

    def close(self) -> None:
        """Stop the bar and restore the terminal's cursor."""
        if self._bar is not None:
            self._bar.stop()

    def _print(self, line: str | Table) -> None:
        if self._gone:
            return
        try:
            self._console.print(line, markup=False, soft_wrap=isinstance(line, str))
            self._console.file.flush()
        except OSError as error:
            self._gone = True
            warn(f"the console cannot be written ({error.strerror}); the run continues, and its folder has the rest")
            if self._console.file is sys.stdout:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())  # so that flushing the rest of the buffer succeeds


def start_lines(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return labels and texts of a run's first lines, from the argument of `Observer.on_start`."""
    kernels = ", ".join(f"{operation}: {served}" for operation, served in info.get("kernels", {}).items())
    link = link_in_words(info["link"]) if info.get("link") else ""
    others = {"kernels": kernels, "plan": info.get("plan", ""), "link": link}
    return [*info.get("about", {}).items(), *((name, text) for name, text in others.items() if text)]


def link_in_words(link: Mapping[str, Any]) -> str:
    """Describe a link: ``simulated between nodes of 1 rank, 200 Mbit/s, 1 ms; measured 199.2 Mbit/s, 1.02 ms``."""
    size, why = link["node_size"], link.get("why_not_comparable")
    speeds = []
    for which in ("asked", "achieved"):
        rate = link[f"{which}_bytes_per_s"]  # null in a log if unlimited
        rate, latency_s = math.inf if rate is None else rate, link[f"{which}_latency_s"]
        speeds.append(f"{bandwidth_in_words(rate)}, {duration_in_words(latency_s)}")
    said = f"{link['mode']} between nodes of {size} rank{'s' if size > 1 else ''}, {'; measured '.join(speeds)}"
    return said + (f"; not comparable: {why}" if why else "")


def in_short(value: Any) -> str:
    """Format a float in four digits, an integer with commas, anything else as ``str`` does."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def facts_of(record: StepRecord) -> list[str]:
    """Format a step: ``loss 4.1234  grad_norm 0.98  lr 3.0e-04  12,345 tok/s  mfu 41.2%  mem 10.1GiB  comm 3%``.

    ``mfu``, ``hfu``, the loss scale, memory and ``comm``, the share of the step for which computation waited for
    communication, appear only if they are known.
    """
    facts = [f"loss {record.loss:.4f}", f"grad_norm {record.grad_norm:.2f}", f"lr {record.lr:.1e}"]
    facts.append(f"{record.tokens_per_s:,.0f} tok/s")
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
    return facts


def _fitting(facts: Sequence[str], width: int) -> Sequence[str]:
    """The first of ``facts`` that fit side by side into ``width`` columns; at least one."""
    most = next((n for n in range(1, len(facts)) if len(GAP.join(facts[: n + 1])) > width), len(facts))
    return facts[:most]


def bytes_in_words(num_bytes: int) -> str:
    """Format bytes, as ``10.1GiB``, ``12.3MiB``, ``4.0KiB`` or ``12B``."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}{unit}"
    return f"{num_bytes}B"


class _Remaining(ProgressColumn):
    """The column of the remaining time, ``eta 0:12:34``; while a checkpoint is being written, ``saving 42%``."""

    def render(self, task: Task) -> Text:
        saved, left = task.fields["saved"], task.time_remaining
        if saved is not None:
            return Text(f"saving {saved:.0%}")
        if left is None:
            return Text("eta -:--:--")
        return Text(f"eta {int(left) // 3600}:{int(left) // 60 % 60:02}:{int(left) % 60:02}")


class _Bar(Progress):
    """rich's progress display of one task, `run`: always one line high, and two columns narrower than the terminal.

    One line, because rich's thread redraws the bar while the trainer prints, and the two outputs may be written in
    another order than they were rendered in. If the bar's height changed between them, the later one would erase a line
    of the run's output. Narrower, because the terminal echoes ``^C`` after the bar. In a full line that would wrap to a
    second one, which is never erased.
    """

    def __init__(self, console: Console, max_steps: int) -> None:
        super().__init__(
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            _Remaining(Column(no_wrap=True)),
            TextColumn("{task.fields[facts]}", markup=False, table_column=Column(no_wrap=True)),
            console=console,
            expand=True,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stderr=sys.stderr.isatty(),  # not if stderr is a file: errors would go to the terminal instead
        )
        self.run = self.add_task("train", total=max_steps, facts="", saved=None)

    def get_renderables(self) -> Iterable[RenderableType]:
        yield Padding(self.make_tasks_table(self.tasks), (0, len("^C"), 0, 0))
