"""Does a test see each mistake? ``make mutants`` makes them one by one in copies of the tree.

First all named tests run without any mutant; whatever fails there proves nothing. Then each mutant is written into a
copy, its tests run there until one fails, and the file is put back. The exit status is 1 where a mutant survived, hung
its tests (they might be slow, and no more) or broke them before they ran, else 0.
"""

import argparse
import compileall
import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from mutants.catalogue import ROOT, Mutant, catalogue

NOT_COPIED = (".venv", ".git", "runs", "data", "sweeps", "site", "dist", "build", ".*_cache", ".hypothesis")
# The last: the server has imported plugins before pytest could rewrite their assertions.
ARGS = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--timeout=0", "-W"]
ARGS += ["ignore::pytest.PytestAssertRewriteWarning"]
TESTS_FAILED = 1  # pytest's exit status


class Copy:
    """A copy of the tree, and a server that runs pytest in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # of the folder itself too: a checkout may be below one that is called like what is left out
        for name in sorted(os.listdir(ROOT)):
            if shutil.ignore_patterns(*NOT_COPIED)(str(ROOT), [name]):
                continue
            if (ROOT / name).is_dir():
                ignore = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / name, folder / name, ignore=ignore)
            elif (ROOT / name).is_file():
                shutil.copy2(ROOT / name, folder / name)
        # by hash: a mutant may be as long as what it replaces, and as old to the second
        compileall.compile_dir(folder / "src", quiet=1, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        path = os.pathsep.join(str(folder / name) for name in ("src", "tests", "tests/support"))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        server = folder / "tests" / "mutants" / "server.py"
        self._server = subprocess.Popen(
            [sys.executable, str(server)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def pytest(self, tests: Iterable[str], timeout_s: float, *args: str) -> dict[str, Any]:
        """Run tests; see `mutants.server` for what comes back."""
        assert self._server.stdin is not None
        print(json.dumps({"args": [*ARGS, *args, *tests], "timeout_s": timeout_s}), file=self._server.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        if not line:
            raise RuntimeError("the process that runs the tests has ended; see what it printed")
        return json.loads(line)

    @contextlib.contextmanager
    def mutated(self, mutant: Mutant) -> Generator[None]:
        """In this block the copy has the mistake."""
        path = self.folder / mutant.path
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(before), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def judged(copy: Copy, mutant: Mutant, timeout_s: float, *args: str) -> tuple[str, str]:
    """``("seen" | "SURVIVED" | "HUNG" | "BROKEN", what was found)`` of one mutant."""
    with copy.mutated(mutant):
        answer = copy.pytest(mutant.tests, timeout_s, *args)
    if answer["status"] == TESTS_FAILED:
        failed = ", ".join(f"{test} ({seconds} s)" for test, seconds in answer["failed"].items())
        return "seen", f"{answer['cpu_s']} s of the processor: {failed}"
    if answer["status"] is None:
        return "HUNG", f"no end in {timeout_s:.0f} s, or by a signal: name a test that says what is wrong"
    if answer["status"] == 0:
        return "SURVIVED", mutant.breaks
    return "BROKEN", f"pytest's exit status {answer['status']}\n{answer['output'][-2000:]}"


def fails_without_mutants(copy: Copy, mutants: Iterable[Mutant]) -> str:
    """What the named tests say of the tree as it is: "" where all pass."""
    tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    # a file, and a test in it: pytest would run the latter twice
    tests = [test for test in tests if test.split("::")[0] not in tests or "::" not in test]
    answer = copy.pytest(tests, 60.0 * len(tests) + 60.0)
    return "" if answer["status"] == 0 else answer["output"][-4000:] or f"pytest's exit status {answer['status']}"


def run(mutants: list[Mutant], num_jobs: int, timeout_s: float, *args: str) -> dict[str, str]:
    """Each mutant's verdict, by name; printed as they come.

    Raises:
        RuntimeError: the tests fail without any mutant.
    """
    waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
    verdicts: dict[str, str] = {}
    failures: list[BaseException] = []
    for mutant in mutants:
        waiting.put(mutant)

    def work(copy: Copy) -> None:
        try:
            while True:
                mutant = waiting.get_nowait()
                began = time.monotonic()
                verdict, found = judged(copy, mutant, timeout_s, *args)
                verdicts[mutant.name] = verdict
                print(f"{verdict:8}  {time.monotonic() - began:5.1f} s  {mutant.name}: {found}", flush=True)
        except queue.Empty:
            return
        except BaseException as error:  # noqa: BLE001 -- it is raised again below
            failures.append(error)

    with tempfile.TemporaryDirectory(prefix="zeroshard-mutants-") as folder:
        copies = [Copy(Path(folder) / str(index)) for index in range(max(1, min(num_jobs, len(mutants))))]
        try:
            if found := fails_without_mutants(copies[0], mutants):
                raise RuntimeError(f"the named tests fail without any mutant:\n{found}")
            threads = [threading.Thread(target=work, args=(copy,)) for copy in copies]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for copy in copies:
                copy.close()
    if failures:
        raise failures[0]
    return verdicts


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", nargs="+", metavar="NAME", help="these mutants; a name that ends in * is the beginning of several")
    add("--jobs", type=int, default=1, metavar="N", help="copies of the tree that work at once (default: 1)")
    add("--list", action="store_true", help="name the mutants and what they break, and run nothing")
    add("--timeout-s", type=float, default=600.0, help="for a mutant's tests; where they hang nobody has seen it")
    add("--all-failures", action="store_true", help="do not stop at a mutant's first failing test")
    asked = parser.parse_args(argv)
    mutants = catalogue()
    if asked.only:
        if unknown := [name for name in asked.only if not any(_is_called(mutant, name) for mutant in mutants)]:
            parser.error(f"no mutant is called {', '.join(unknown)}; --list names them")
        mutants = [mutant for mutant in mutants if any(_is_called(mutant, name) for name in asked.only)]
    if asked.list:
        for mutant in mutants:
            print(f"{mutant.name:40} {mutant.file:28} {mutant.breaks}")
        return 0
    began = time.monotonic()
    args = ["--maxfail=1000"] if asked.all_failures else []
    try:
        verdicts = run(mutants, asked.jobs, asked.timeout_s, *args)
    except (RuntimeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    count = Counter(verdicts.values())
    found = f"{count['seen']} seen, {count['SURVIVED']} survived, {count['HUNG'] + count['BROKEN']} hung or broken"
    print(f"{found}, in {(time.monotonic() - began) / 60:.1f} min")
    failed = [f"{verdict}: {name}" for name, verdict in verdicts.items() if verdict != "seen"]
    print("\n".join(failed), end="\n" if failed else "")
    return int(bool(failed))


def _is_called(mutant: Mutant, name: str) -> bool:
    return mutant.name.startswith(name[:-1]) if name.endswith("*") else mutant.name == name


if __name__ == "__main__":
    sys.exit(main())
