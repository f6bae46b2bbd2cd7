"""Which test sees a mistake: each is made in a fork of a process that has collected the tests.

Only tests that run the line are tried until one fails: first those that have seen others in the file, then those that
are likeliest for what they cost. A test that fails in a fork without any mistake sees nothing, and is left out.
"""

import json
import os
import select
import shutil
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

import forked
import observed
from evidence.mistakes import Mistake, find_functions, import_file

START_S = 60.0  # by the clock, of what is no test's own
SEEN, UNSEEN, HUNG, STOPPED, NOT_MADE = "seen", "UNSEEN", "hung", "stopped", "not made"


class Trials:
    """A plugin of pytest that tries mistakes in place of running tests, and writes ``mistakes.jsonl``.

    Args:
        folder: of the record.
        mistakes: to try, each with tests that may see it, in order, and how many more could: then it is "stopped".
        costs: of tests, in seconds of the processor.
        slower: so many times its cost may a test take by the clock, and `START_S`; then it is "hung".
    """

    def __init__(
        self,
        folder: Path,
        mistakes: list[tuple[Mistake, list[str], int]],
        costs: Mapping[str, float],
        slower: float = 20.0,
    ) -> None:
        self.folder, self.mistakes, self.costs, self.slower = folder, mistakes, costs, slower
        self.failed = False
        self.sound: dict[str, bool] = {}  # whether it passes in a fork
        self.have_seen: dict[str, Counter[str]] = defaultdict(Counter)  # by file, tests that have seen mistakes in it

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Called by pytest when tests are collected."""
        items = {item.nodeid: item for item in session.items}
        forked.start_server()
        forked.connect().close()
        for file in sorted({mistake.file for mistake, *_ in self.mistakes}):
            import_file(file)
        find_functions()
        for place, (mistake, tests, left) in enumerate(self.mistakes):
            have_seen = self.have_seen[mistake.file]
            order = sorted((test for test in tests if test in items), key=lambda test: -have_seen[test])
            verdict, test, tried = self.tried(session, mistake, [items[test] for test in order])
            verdict = STOPPED if verdict == UNSEEN and left else verdict
            have_seen.update([test] if test else [])
            change = mistake.change
            row = [mistake.file, mistake.number, change.line, str(change), verdict, test, tried]
            with (self.folder / "mistakes.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{place + 1}/{len(self.mistakes)} {verdict:8} {mistake.file}:{change.line} {change}: {test}",
                flush=True,
            )
        return True

    def tried(self, session: pytest.Session, mistake: Mistake, items: list[pytest.Item]) -> tuple[str, str, int]:
        """The verdict, the test that saw it or hung, and how many tests were tried."""
        tried = 0
        while True:
            verdict, test, num = self._in_fork(session, items, mistake)
            tried += num
            if verdict not in (SEEN, HUNG):
                return verdict, "", tried
            if test not in self.sound:
                alone = [item for item in items if item.nodeid == test]
                self.sound[test] = self._in_fork(session, alone, None)[0] == UNSEEN
                if not self.sound[test]:
                    print(f"{verdict} without any mistake: {test}", flush=True)
            if self.sound[test]:
                return verdict, test, tried
            items = [item for item in items[num:] if self.sound.get(item.nodeid, True)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Called by pytest in a fork."""
        self.failed |= report.failed

    def _in_fork(
        self, session: pytest.Session, items: Sequence[pytest.Item], mistake: Mistake | None
    ) -> tuple[str, str, int]:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _in_child(lambda: self._run(session, items, mistake, writing))
        os.close(writing)
        tests, verdict = [""], HUNG
        answers = b""
        while select.select([reading], [], [], START_S + self.slower * self.costs.get(tests[-1], 0.0))[0]:
            answers += (more := os.read(reading, 1 << 16))
            *whole, answers = answers.split(b"\n")
            for kind, _, test in (line.decode().partition(" ") for line in whole):
                tests += [test] if kind == "test" else []
                verdict = verdict if kind == "test" else kind.replace("-", " ")
            if verdict != HUNG:
                break
            if not more:
                verdict = SEEN  # the process has died
                break
        os.close(reading)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        shutil.rmtree(_folder(session, child), ignore_errors=True)
        return verdict, tests[-1], len(tests) - 1

    def _run(
        self, session: pytest.Session, items: Sequence[pytest.Item], mistake: Mistake | None, answers: int
    ) -> None:
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
        folders._basetemp, folders._given_basetemp = None, _folder(session, os.getpid())
        (self.folder / "cache").mkdir(exist_ok=True)
        (folders.getbasetemp() / ".cache").symlink_to(self.folder / "cache")  # compiled loops, which no mistake is in
        if mistake is not None:
            os.environ[observed.MISTAKE] = json.dumps([mistake.file, mistake.number])
            if not mistake.make():
                os.write(answers, b"not-made\n")
                return
        verdict = UNSEEN
        for item, following in zip(items, [*items[1:], None], strict=False):
            os.write(answers, f"test {item.nodeid}\n".encode())
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                verdict = SEEN
                break
        os.write(answers, f"{verdict}\n".encode())


def _folder(session: pytest.Session, child: int) -> Path:
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    return folders.getbasetemp() / f"trial{child}"


def _in_child(do: Callable[[], None]) -> NoReturn:
    try:
        os.setpgid(0, 0)
        do()
    finally:
        os._exit(0)
