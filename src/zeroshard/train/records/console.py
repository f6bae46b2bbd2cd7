"""Console output of a run: a description at the start, then a line every `log_interval` steps and for each event.

A line comes at least every `SILENCE_S` seconds, as steps end; on a terminal one that each step replaces stands below.
"""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from zeroshard.host.columns import columns
from zeroshard.host.errors import warn
from zeroshard.settings.sizes import bandwidth_in_words, duration_in_words
from zeroshard.train.records.records import Callback, StepRecord, in_memory

GIB = 2**30
GAP = "  "  # between the values of a line
SILENCE_S = 10.0
ERASE = "\r\x1b[2K"  # the line that the cursor is in


class ConsoleRecorder(Callback):
    """The callback that prints lines, one every `log_interval` steps and at least every `SILENCE_S` seconds.

    If stdout cannot be written any more, as after ``| head``, it warns once on stderr, and the run continues.

    Args:
        stream: where to print; None: stdout.
        next_command: what to do with a run that has ended well, named in its last line; empty: nothing.
    """

    def __init__(
        self, max_steps: int, log_interval: int = 10, stream: TextIO | None = None, next_command: str = ""
    ) -> None:
        self._max_steps, self._log_interval, self._next_command = max_steps, log_interval, next_command
        self._stream, self._gone = stream or sys.stdout, False
        self._step_s: list[float] = []  # of the steps since the last line
        has_terminal = self._stream is not None and self._stream.isatty()  # None: closed, as by >&-
        self._live, self._shown = has_terminal, ""  # what a terminal shows now, below the lines
        self._last_line = time.monotonic()

    def on_start(self, info: Mapping[str, Any]) -> None:
        """Print the description of the run, each line with a label and a text."""
        kernels = ", ".join(f"{operation}: {served}" for operation, served in info.get("kernels", {}).items())
        link = link_in_words(info["link"]) if info.get("link") else ""
        lines = {**info.get("about", {}), "kernels": kernels, "plan": info.get("plan", ""), "link": link}
        for line in columns([(name, text) for name, text in lines.items() if text]):
            self._print(line)

    def on_step(self, record: StepRecord) -> None:
        """Print a line at the first, the last and every `log_interval`-th step, with the time that is left."""
        self._step_s.append(record.step_s)
        eta = f"eta {_clock((self._max_steps - record.step) * fmean(self._step_s))}"
        silent = not self._live and time.monotonic() - self._last_line > SILENCE_S
        if record.step in (1, self._max_steps) or record.step % self._log_interval == 0 or silent:
            self._print(f"step {record.step}", *facts_of(record), *([eta] if 1 < record.step < self._max_steps else []))
            self._step_s.clear()
        elif self._live:
            facts = f"step {record.step} of {self._max_steps}", f"loss {record.loss:.4f}", rate_of(record), eta
            self._shown = GAP.join(facts)[: shutil.get_terminal_size().columns - 1]
            self._write(f"{ERASE}{self._shown}")

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """Print the validation losses."""
        self._print(f"step {step}", *(f"{name} {loss:.4f}" for name, loss in losses.items()))

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """Print the checkpoint's path; `Saving` reports one that could not be written."""
        if "error" not in (facts or {}):
            self._print(f"step {step}", f"checkpoint {path}")

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Print how it ended, and in a line of its own what to do next; ``summary.json`` has tables and the rest."""
        known = {name: value for name, value in summary.items() if not isinstance(value, Mapping | None)}
        if known.get("last_checkpoint_step") == known.get("step"):
            known.pop("last_checkpoint_step", None)
        if not known.get("num_skipped"):
            known.pop("num_skipped", None)
        wall_s = known.pop("wall_s", None)
        ended = [f"{name} {in_short(value)}" for name, value in known.items()]
        self._print(*ended, *([f"time {_clock(wall_s)}"] if wall_s is not None else []))
        if self._next_command and summary.get("status") == "ok":
            self._print(f"next: {self._next_command}")

    def _print(self, *facts: str) -> None:
        self._write(f"{ERASE if self._shown else ''}{GAP.join(facts)}\n")
        self._shown, self._last_line = "", time.monotonic()

    def _write(self, text: str) -> None:
        if self._gone:
            return
        try:
            print(text, end="", file=self._stream, flush=True)
        except OSError as error:
            self._gone = True
            warn(f"the console cannot be written ({error.strerror}); the run continues, and its folder has the rest")
            if self._stream is sys.stdout:
                with open(os.devnull, "w", encoding="utf-8") as nowhere:
                    os.dup2(nowhere.fileno(), sys.stdout.fileno())  # so that flushing the rest of the buffer succeeds


def link_in_words(link: Mapping[str, Any]) -> str:
    """Describe a link: ``simulated between nodes of 1 rank, 200 Mbit/s, 1 ms; measured 199.2 Mbit/s, 1.02 ms``."""
    size, why, speeds = link["node_size"], link.get("why_not_comparable"), []
    for which in ("asked", "achieved"):
        rate = link[f"{which}_bytes_per_s"] or math.inf  # null in a log if unlimited
        speeds.append(f"{bandwidth_in_words(rate)}, {duration_in_words(link[f'{which}_latency_s'])}")
    said = f"{link['mode']} between nodes of {size} rank{'s' if size > 1 else ''}, {'; measured '.join(speeds)}"
    return said + (f"; not comparable: {why}" if why else "")


def in_short(value: Any) -> str:
    """Format a float in four digits, an integer with commas, anything else as ``str`` does."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def facts_of(record: StepRecord) -> list[str]:
    """Describe a step: ``loss 4.1234  grad_norm 0.98  lr 3.0e-04  12,345 tok/s  mfu 41.2%  mem 10.1GiB  comm 3%``.

    ``mfu``, ``hfu``, the loss scale, memory and ``comm``, the share of the step for which computation waited for
    communication, appear only if they are known.
    """
    facts = [f"loss {record.loss:.4f}", f"grad_norm {record.grad_norm:.2f}", f"lr {record.lr:.1e}"]
    facts.append(rate_of(record))
    facts += [f"{name} {share:.1%}" for name in ("mfu", "hfu") if (share := getattr(record, name)) is not None]
    if record.loss_scale is not None:
        facts.append(f"scale {record.loss_scale:g}")
    if record.loss_scale is not None or record.num_skipped:
        facts.append(f"skipped {record.num_skipped}")
    if record.memory_bytes:
        facts.append(f"mem {bytes_in_words(in_memory(record.memory_bytes))}")
    if record.exposed_s:
        facts.append(f"comm {sum(record.exposed_s.values()) / record.step_s:.0%}")
    return facts


def rate_of(record: StepRecord) -> str:
    """Describe how fast a step was: ``12,345 tok/s``."""
    return f"{record.tokens_per_s:,.0f} tok/s"


def _clock(seconds: float) -> str:
    """Format a time as ``1:02:03``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def bytes_in_words(num_bytes: int) -> str:
    """Format bytes, as ``10.1GiB``, ``12.3MiB``, ``4.0KiB`` or ``12B``."""
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f}{unit}"
    return f"{num_bytes}B"
