"""`subprocess` for tests, where ``python ...`` is forked from a server that has imported torch: `fork_server`.

`Popen` and `run` take what `subprocess`'s take, with ``[sys.executable, "-m" | "-c" | SCRIPT, ...]``. A
program that must be a real start (signals at start, import times, packaging) says `subprocess`. `PYTHON` is a command
that stands for ``python``, for launchers and shell scripts that start it by themselves.
"""

import atexit
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

SUPPORT = Path(__file__).parent
PYTHON = str(SUPPORT / "forked-python")
ADDRESS = "ZEROSHARD_TESTS_FORK_SERVER"
_LENGTH = struct.Struct("!I")
_server: subprocess.Popen | None = None  # in the process that has started it
TIME_TO_START_S = 300.0


def still_running(processes: Iterable[psutil.Process], timeout_s: float = 300.0) -> list[psutil.Process]:
    """Those that do not end in time; one that has ended and that nobody has waited for yet is not among them."""
    deadline = time.monotonic() + timeout_s
    while (left := [each for each in processes if _runs(each)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """One of the loopback interface that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meeting_point(world_size: int) -> dict[str, str]:
    """Variables by which so many processes of one thread meet, but for each one's rank."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return {"WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1", **address}


def start_server() -> None:
    """Start the server that this process and those it starts will use; it ends with this process."""
    global _server
    if ADDRESS in os.environ:
        return
    folder = tempfile.mkdtemp(prefix="zeroshard-fork-")
    path = f"{folder}/socket"
    env = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    env.pop("COVERAGE_PROCESS_START", None)  # a program that is forked asks for it: `observed.begin`
    _server = server = subprocess.Popen(
        [sys.executable, SUPPORT / "fork_server.py", path], stdin=subprocess.PIPE, env=env
    )
    os.environ[ADDRESS] = path

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)


def connect() -> socket.socket:
    """A connection to the server, once it listens."""
    start_server()
    client, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + TIME_TO_START_S
    while True:
        try:
            client.connect(os.environ[ADDRESS])
        except (FileNotFoundError, ConnectionRefusedError):
            if (_server is not None and _server.poll() is not None) or time.monotonic() > deadline:
                client.close()
                raise RuntimeError("tests/support/fork_server.py has ended; what it wrote to stderr says why") from None
            select.select([], [], [], 0.02)  # it is starting
        else:
            return client


class Popen(subprocess.Popen):
    """A forked program, for whoever knows `subprocess.Popen`."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *others: Any) -> None:  # fmt: skip
        words = [os.fsdecode(word) for word in args]
        assert words[0] in (sys.executable, PYTHON), f"{words[0]} is no Python: use subprocess"
        refused = [shell, preexec_fn, pass_fds]
        assert not any(refused), "a forked program takes no shell, preexec_fn or pass_fds: use subprocess"
        self._server = connect()
        # a copy of the environment may be older than the server; what the program starts asks it where that is
        variables = {**(os.environ if env is None else env), ADDRESS: os.environ[ADDRESS]}
        request = {
            "args": words[1:],
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in variables.items()},
            "cwd": os.fsdecode(cwd or os.getcwd()),
        }
        data = json.dumps(request).encode()
        streams = [p2cread if p2cread >= 0 else 0, c2pwrite if c2pwrite >= 0 else 1, errwrite if errwrite >= 0 else 2]
        socket.send_fds(self._server, [_LENGTH.pack(len(data))], streams)
        self._server.sendall(data)
        self._lines = self._server.makefile("rb")
        self.pid = json.loads(self._lines.readline())["pid"]
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._server], [], [], 0)[0]:
            return 0, 0
        line = self._lines.readline()
        self._lines.close()
        self._server.close()
        return self.pid, json.loads(line)["status"] if line else signal.SIGKILL

    def _internal_poll(self, _deadstate: int | None = None, *, no_waiting: int = os.WNOHANG) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None:
                    pid, status = self._try_wait(no_waiting)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(args: Any, *, input: Any = None, capture_output: bool = False, timeout: float | None = None,
        check: bool = False, **options: Any) -> subprocess.CompletedProcess:  # fmt: skip
    """`subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
