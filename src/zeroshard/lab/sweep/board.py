"""Progress of a sweep: a live table on a terminal, otherwise a plain line for each run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from zeroshard.lab.run_folders import RunResult, Spread, spread
from zeroshard.lab.sweep.cases import Case, in_words
from zeroshard.lab.sweep.results import CaseResult, read_sweep

_ROWS = 24  # most rows of the live table: the cases that have begun, the last of them if there are more
_NAME_DIGITS = 6


class SweepProgress:
    """Shows the progress of a sweep: the sweep calls one of its methods at each event."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._rows: dict[str, _Row] = {}
        self._seconds: list[float] = []  # durations of the runs so far
        self._num_ended = self._num_all = 0

    @contextmanager
    def live(self, cases: Sequence[Case], num_runs: int) -> Generator[None]:
        """Show the live table while ``cases`` run, ``num_runs`` runs in all."""
        self._rows = {case.name: _Row(case) for case in cases}
        self._num_ended, self._num_all = 0, num_runs
        if not self._console.is_terminal:
            yield
            return
        with Live(self._table(), console=self._console, refresh_per_second=2, transient=True) as self._live:
            try:
                yield
            finally:
                self._live = None

    def begins(self, case: Case, repeat: int) -> None:
        """Show that a run begins."""
        self._row(case).now = f"run {repeat + 1}, since {time.strftime('%H:%M:%S')}"
        self._refresh()

    def tries(self, case: Case, what: str) -> None:
        """Show that a short trial run begins, which only tests whether a micro-batch fits."""
        self._row(case).now = f"tries {what}"
        self._refresh()
        self._line(f"{'':9}{case.name[:_NAME_DIGITS]}  {in_words(case.axes)}  tries {what}")

    def ended(self, case: Case, repeat: int, run: RunResult, *, seconds: float | None, failure: str = "") -> None:
        """Show that a run has ended; ``seconds`` None: it had ended before this sweep started."""
        row = self._row(case)
        row.now, row.failure = "", failure or row.failure
        if run.state == "done":
            row.runs.append(run)
        self._num_ended += 1
        if seconds is not None:
            self._seconds.append(seconds)
        self._refresh()
        width = len(str(self._num_all))
        took = "done before" if seconds is None else f"done in {seconds:.1f} s"
        fate = f"failed: {failure}" if failure else f"{took}  {_facts(run)}"
        self._line(
            f"[{self._num_ended:{width}}/{self._num_all}] {case.name[:_NAME_DIGITS]}  {in_words(case.axes)}  "
            f"run {repeat + 1}  {fate}{self._left()}"
        )

    def refused(self, case: Case, why: str = "") -> None:
        """Show that a case cannot run, and why."""
        self.say(f"{case.name[:_NAME_DIGITS]}  {in_words(case.axes)}  refused: {why or case.refusal}")

    def list_cases(self, cases: Sequence[Case]) -> None:
        """Print the cases that would run."""
        for case in cases:
            refused = f"  refused: {case.refusal}" if case.refusal else ""
            self.say(f"{case.name}  {in_words(case.axes)}{refused}")

    def say_results(self, folder: Path) -> None:
        """Print the median of each case, with the lowest and the highest of its repeats."""
        for case in read_sweep(folder).cases:
            self.say(f"{case.name[:_NAME_DIGITS]}  {in_words(case.axes)}  {_medians(case)}")

    def say(self, line: str) -> None:
        """Print a line, above the live table if there is one."""
        self._console.print(line, markup=False)
        self._console.file.flush()

    def _line(self, line: str) -> None:
        if self._live is None:
            self.say(line)

    def _row(self, case: Case) -> _Row:
        return self._rows.setdefault(case.name, _Row(case))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _left(self) -> str:
        num_left = self._num_all - self._num_ended
        if not self._seconds or not num_left:
            return ""
        return f"  {_duration(statistics.mean(self._seconds) * num_left)} left"

    def _table(self) -> Table:
        title = f"{self._num_ended} of {self._num_all} runs{self._left()}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for column in ("case", "", "runs", "step", "tokens/s", "exposed", ""):
            table.add_column(column, no_wrap=True)
        rows = list(self._rows.values())
        shown = [row for row in rows if row.now or row.failure or row.runs][-_ROWS:] or rows[:_ROWS]
        for row in shown:
            step, rate = spread(run.step_s for run in row.runs), spread(run.tokens_per_s for run in row.runs)
            exposed = spread(run.exposed_s / run.step_s for run in row.runs)
            table.add_row(
                row.case.name[:_NAME_DIGITS],
                in_words(row.case.axes),
                str(len(row.runs)),
                f"{step.median * 1e3:.1f} ms" if step else "",
                f"{rate.median:,.0f}" if rate else "",
                f"{exposed.median:.0%}" if exposed else "",
                row.now or row.failure,
            )
        return table


class _Row:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.runs: list[RunResult] = []
        self.now = self.failure = ""


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
    words = [f"step {_between(case.step_s, 1e3, ' ms')}", f"{_between(case.tokens_per_s, 1, ' tok/s')}"]
    words += [f"not comparable: {why}" for why in case.why_not_comparable[:1]]
    return "  ".join(words)


def _between(found: Spread | None, scale: float, unit: str) -> str:
    if found is None:
        return "unknown"
    middle = f"{found.median * scale:,.1f}{unit}"
    return f"{middle} ({found.low * scale:,.1f} to {found.high * scale:,.1f})" if found.count > 1 else middle


def _duration(seconds: float) -> str:
    """Format seconds: ``45 s``, ``12 min`` or ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
