"""Progress of a sweep: a line for each run, and what each case came to."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from zeroshard.lab.run_folders import RunResult
from zeroshard.lab.sweep.cases import Case, in_words
from zeroshard.lab.sweep.results import CaseResult, read_sweep

_NAME_DIGITS = 6


class SweepProgress:
    """Prints the progress of a sweep to ``stream``: the sweep calls one of its methods at each event."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._seconds: list[float] = []  # durations of the runs so far
        self._num_ended = self.num_all = 0

    def begins(self, case: Case, repeat: int) -> None:
        """Say on a terminal that a run begins, which may take minutes."""
        if self._stream.isatty():
            self.print_line(f"{'':9}{_named(case)}  run {repeat + 1}, since {time.strftime('%H:%M:%S')}")

    def ended(self, case: Case, repeat: int, run: RunResult, *, seconds: float | None, failure: str = "") -> None:
        """Say that a run has ended; ``seconds`` None: it had ended before this sweep started."""
        self._num_ended += 1
        if seconds is not None:
            self._seconds.append(seconds)
        took = "done before" if seconds is None else f"done in {seconds:.1f} s"
        fate = f"failed: {failure}" if failure else f"{took}  {_facts(run)}"
        count = f"[{self._num_ended:{len(str(self.num_all))}}/{self.num_all}]"
        self.print_line(f"{count} {_named(case)}  run {repeat + 1}  {fate}{self._left()}")

    def refused(self, case: Case) -> None:
        """Say that a case cannot run, and why."""
        self.print_line(f"{_named(case)}  refused: {case.refusal}")

    def list_cases(self, cases: Sequence[Case]) -> None:
        """Print the cases that would run."""
        for case in cases:
            refused = f"  refused: {case.refusal}" if case.refusal else ""
            self.print_line(f"{case.name}  {in_words(case.axes)}{refused}")

    def print_results(self, folder: Path) -> None:
        """Print the median of each case, with the lowest and the highest of its repeats."""
        for case in read_sweep(folder).cases:
            self.print_line(f"{_named(case)}  {_medians(case)}")

    def print_line(self, line: str) -> None:
        """Print a line."""
        print(line, file=self._stream, flush=True)

    def _left(self) -> str:
        num_left = self.num_all - self._num_ended
        if not self._seconds or not num_left:
            return ""
        return f"  {_duration(statistics.mean(self._seconds) * num_left)} left"


def _named(case: Case | CaseResult) -> str:
    return f"{case.name[:_NAME_DIGITS]}  {in_words(case.axes)}"


def _facts(run: RunResult) -> str:
    facts = [
        f"step {run.step_s * 1e3:.1f} ms",
        f"{run.tokens_per_s:,.0f} tok/s",
        f"exposed {run.exposed_s / run.step_s:.0%}",
    ]
    if run.link is not None and not run.link.comparable:
        facts.append(f"not comparable: {run.link.why_not_comparable}")
    return "  ".join(facts)


def _medians(case: CaseResult) -> str:
    if not case.done:
        return f"failed: {case.failures[0]}" if case.failures else "not run"
    step = case.step_s.text(1e3, ",.1f", " ms") if case.step_s else "unknown"
    rate = case.tokens_per_s.text(1, ",.1f", " tok/s") if case.tokens_per_s else "unknown"
    return "  ".join([f"step {step}", rate, *(f"not comparable: {why}" for why in case.why_not_comparable[:1])])


def _duration(seconds: float) -> str:
    """Format seconds: ``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
