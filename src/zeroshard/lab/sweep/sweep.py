"""Runs a sweep: one run after another, each in a process of its own; a failed run does not stop the others.

Only the run folders say which runs are done. A sweep that was killed at any moment and is started again therefore runs
those that did not end successfully, and none twice. A run ends with its sweep; the folder of an unfinished run is
removed before the run starts again. A run that failed leaves a file beside its folder that says why; only ``--retry``
runs it again.

    OUT/sweep.json                     the settings of the sweep, and its cases
    OUT/cases/HASH/0/                  the run folder of a case's first repeat
    OUT/cases/HASH/0.toml              the configuration of that run
    OUT/cases/HASH/0.log               the output of all its attempts, appended
    OUT/cases/HASH/0.failed.json       why the last attempt failed, if it did
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.launch.start_ranks import start_child
from zeroshard.host.masked_addresses import masked
from zeroshard.host.regular_files import open_binary, open_inside, open_regular, write_inside
from zeroshard.lab.run_folders import METRICS, RunResult, read_run
from zeroshard.lab.sweep.board import SweepProgress
from zeroshard.lab.sweep.cases import Case, SweepConfig, cases_of, in_words
from zeroshard.lab.sweep.results import SWEEP, SWEEP_FORMAT, failure_file, read_failure, read_sweep, run_folder
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.data_section import flags_for_secrets
from zeroshard.train.config.named_code import flags_for_code
from zeroshard.train.config.toml import all_settings, dump_toml

TRAIN = (sys.executable, "-m", "zeroshard", "train")
_GRACE_S = 5.0  # from asking a run to stop to SIGKILL


def run_sweep(sweep: SweepConfig, *, command: Sequence[str] = TRAIN, stream: TextIO | None = None) -> int:
    """Run the runs of ``sweep`` that are not done yet, and return the exit status: 1 if any has failed.

    Args:
        command: the command that trains, to which ``--config FILE`` is appended.
        stream: where progress is printed; None: stdout.

    Raises:
        UserError: no case can run, or another process is running this sweep.
    """
    cases = cases_of(sweep)
    with _locked_folder(Path(sweep.out)) as folder:
        board = SweepProgress(stream or sys.stdout)
        runner = Runner(folder, sweep, command, board)
        if sweep.dry_run:
            board.list_cases(cases)
            return ExitStatus.OK
        _tell_of_others(folder, cases, board)
        runner.run(cases)
        board.print_results(folder)
        return ExitStatus.FAILED if runner.num_failed else ExitStatus.OK


class Runner:
    """Runs the cases that are not done, in a sweep's folder; ``num_failed`` counts those that failed or cannot run."""

    def __init__(self, folder: Path, sweep: SweepConfig, command: Sequence[str], board: SweepProgress) -> None:
        self.folder, self.sweep, self.command, self.board = folder, sweep, command, board
        self.num_failed = 0
        self._listed: dict[str, Case] = {}

    def run(self, cases: Sequence[Case]) -> None:
        """Run each case as often as the sweep repeats; all cases run once before any runs again."""
        self._list(cases)
        able: list[tuple[Case, TrainConfig]] = []
        for case in cases:
            if case.config is None:
                self.num_failed += 1
                self.board.refused(case)
            else:
                able.append((case, case.config))
        self.board.num_all = len(able) * self.sweep.repeats
        for repeat in range(self.sweep.repeats):
            for case, config in able:
                self.run_once(case, config, repeat)

    def run_once(self, case: Case, config: TrainConfig, repeat: int) -> RunResult:
        """Run one repeat of a case unless it is done or has failed before; returns the contents of its run folder."""
        target, failure = (where(self.folder, case.name, repeat) for where in (run_folder, failure_file))
        found = read_run(target)
        if found.state == "done":
            self.board.ended(case, repeat, found, seconds=None)
            return found
        if failure.exists() and not self.sweep.retry:
            self.num_failed += 1
            self.board.ended(case, repeat, found, seconds=None, failure=read_failure(failure))
            return found
        self.board.begins(case, repeat)
        began = time.monotonic()
        line = self._attempt(self._named_at_trackers(config, case, repeat), target, failure)
        self.num_failed += bool(line)
        found = read_run(target)
        self.board.ended(case, repeat, found, seconds=time.monotonic() - began, failure=line)
        return found

    def _named_at_trackers(self, config: TrainConfig, case: Case, repeat: int) -> TrainConfig:
        """``config`` with the case's words as the run's name at trackers, and the sweep's as its group."""
        named = {"name": f"{in_words(case.axes)}{f'  run {repeat + 1}' if self.sweep.repeats > 1 else ''}"}
        if {"wandb", "trackio"} & set(config.track.to):
            named["group"] = self.folder.name
        given = {name: value for name, value in named.items() if not getattr(config.track, name)}
        return config.model_copy(update={"track": config.track.model_copy(update=given)}) if config.track.to else config

    def _attempt(self, config: TrainConfig, target: Path, failure: Path) -> str:
        """Run ``config`` in ``target``; returns why it failed, in a line, or an empty string."""
        if target.is_symlink():  # what it leads to is not the sweep's
            target.unlink()
        elif target.exists():
            shutil.rmtree(target)
        failure.unlink(missing_ok=True)
        at = target.parent.relative_to(self.folder)
        settings = target.with_name(f"{target.name}.toml")
        as_toml = all_settings if config.fit == "off" else dump_toml  # to fit, a run may change what was not given
        write_inside(self.folder, at / settings.name, as_toml(config.model_copy(update={"out": str(target)})))
        began = time.monotonic()
        log_path, flags = target.with_name(f"{target.name}.log"), os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(open_inside(self.folder, at / log_path.name, flags), "ab") as log:
            log.write(f"# {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n".encode())
            log.flush()
            start = log.tell()
            # code and secrets of addresses are passed on by flags alone
            words = ["--config", str(settings), *flags_for_code(config), *flags_for_secrets(config.data)]
            status = self._wait(start_child([*self.command, *words], log))
        if status == ExitStatus.OK and read_run(target).state == "done":
            if not self.sweep.checkpoints:
                shutil.rmtree(target / "checkpoints", ignore_errors=True)
            return ""
        line = f"status {status}: {_last_words(log_path, start)}"
        facts = {"status": status, "line": line, "seconds": time.monotonic() - began}
        write_inside(self.folder, at / failure.name, json.dumps(facts) + "\n")
        return line

    def _wait(self, child: subprocess.Popen[bytes]) -> int:
        """Wait for ``child`` and return its exit status; it is ended if we are."""
        try:
            return child.wait()
        except BaseException:
            _end(child)
            raise

    def _list(self, cases: Iterable[Case]) -> None:
        """Add ``cases`` to the sweep's file `SWEEP`, which lists all cases with the sweep's settings."""
        self._listed |= {case.name: case for case in cases}
        entries = [
            {"name": case.name, "axes": case.axes, "repeats": self.sweep.repeats, "refusal": case.refusal}
            for case in self._listed.values()
        ]
        facts = {"format": SWEEP_FORMAT, **self.sweep.model_dump(mode="json"), "cases": entries}
        write_inside(self.folder, SWEEP, masked(json.dumps(facts, indent=1, default=str)) + "\n")


def _tell_of_others(folder: Path, cases: Sequence[Case], board: SweepProgress) -> None:
    """Say how many finished cases in this folder belong to an earlier sweep and not to this one, if any."""
    names = {case.name for case in cases}
    others = [case for case in read_sweep(folder).cases if case.done and case.name not in names]
    if others:
        cases_are, they_stay = ("case is", "it stays") if len(others) == 1 else ("cases are", "they stay")
        what = f"{len(others)} finished {cases_are} of an earlier sweep and not of this one"
        board.print_line(f"{what}; {they_stay} in {folder / 'cases'}")


@contextmanager
def _locked_folder(folder: Path) -> Generator[Path]:
    """Make the sweep's folder and lock it, so that no other process runs the sweep.

    Raises:
        UserError: the folder has a run, cannot be written, or another process has locked it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / METRICS).exists():
            raise UserError("out", f"{folder} holds a run", "choose another folder for the sweep")
        descriptor = open_regular(folder / "sweep.lock", os.O_RDWR | os.O_CREAT, follow=False)
    except OSError as error:
        what = f"{folder} cannot be written ({error.strerror})"
        raise UserError("out", what, "choose a folder that you may write") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what = f"another process is running {folder}"
            raise UserError("out", what, "wait for it, or choose another --out") from None
        yield folder
    finally:
        os.close(descriptor)


def _end(child: subprocess.Popen[bytes]) -> int:
    child.terminate()
    try:
        return child.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        return child.wait()


def _last_words(log: Path, start: int) -> str:
    """The last line of the log that begins with ``error``, or the last line if none does."""
    with open_binary(log) as file:
        file.seek(start)
        lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["it said nothing"])[-1]
