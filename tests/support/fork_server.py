"""A process that has imported torch and zeroshard, and forks Python programs for tests in place of five-second starts.

    python tests/support/fork_server.py SOCKET

It has one thread and has run nothing. A client (`forked.Popen`, or the command `forked-python`) connects to
SOCKET, sends its standard streams and ``{"args": ["-m", "zeroshard", ...], "env": {...}, "cwd": "..."}``, and is sent
``{"pid": ...}`` and then ``{"status": ...}``, a line each; the status is `os.waitpid`'s. A program is set up as the
launcher sets up its ranks (`zeroshard.host.launch.forked`), runs as ``python ARGS`` would, and is killed with its
session if its client goes away. Its `sys.executable` is `forked-python`, so what it starts is forked too. The server
ends when its standard input does.
"""

from __future__ import annotations

import array
import gc
import io
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import tempfile
import types
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import observed

PYTHON = sys.executable
LENGTH = struct.Struct("!I")  # before each request
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.run", "torch.utils.flop_counter", "numpy", "pytest"]
PRELOADED += ["tokenizers", "zeroshard.host.launch.elastic", "zeroshard.train.start"]
PRELOADED += [
    "zeroshard.train.inference.evaluation",
    "zeroshard.train.inference.generate",
    "zeroshard.train.setup.prepare_data",
]
PRELOADED += ["zeroshard.integrations.hf_export", "zeroshard.integrations.hf_import"]
PRELOADED += ["zeroshard.cli.checkpoints", "zeroshard.parallel.zero", "zeroshard.parallel.ddp"]
PRELOADED += ["zeroshard.parallel.fsdp2", "zeroshard.parallel.zero_redundancy", "zeroshard.lab.planner.run_plan"]
PRELOADED += ["zeroshard.lab.planner.plan", "zeroshard.lab.sweep.sweep", "zeroshard.cli.doctor", "zeroshard.cli"]
PRELOADED += ["torch._functorch.partitioners", "networkx"]  # what collecting imports too; no matplotlib, whose
# backend is chosen when it is imported: a notebook's kernel has another


def main(path: str) -> None:
    """Serve until standard input ends."""
    from zeroshard.host import process

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)  # clients that come while modules are imported wait
        process.prepare_torch()
        for name in PRELOADED:
            import_module(name)
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for programs
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests, which then close our standard input
        wanted = select.poll()
        wanted.register(listening, select.POLLIN)
        wanted.register(0, select.POLLIN | select.POLLHUP)
        while 0 not in dict(wanted.poll()):
            _serve(listening)


def _serve(listening: socket.socket) -> None:
    client, _ = listening.accept()
    with client:
        if os.fork() == 0:
            _in_child(lambda: _wait_for_program(client))


def _in_child(do: Callable[[], int]) -> None:
    status = 70
    try:
        status = do()
    finally:
        os._exit(status)


def _wait_for_program(client: socket.socket) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fds = array.array("i")
    (length,) = LENGTH.unpack(_receive(client, LENGTH.size, fds))
    request = json.loads(_receive(client, length, fds))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: _run(request, fds, mask))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    for fd in (*fds, 0, 1, 2):
        os.close(fd)
    client.sendall(json.dumps({"pid": pid}).encode() + b"\n")
    ended = os.pidfd_open(pid)
    events = select.poll()
    events.register(ended, select.POLLIN)
    events.register(client, select.POLLIN)  # it sends nothing more: it has gone
    if ended not in dict(events.poll()):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(pid, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    observed.program_ended(request["env"], request["args"], used)
    try:
        client.sendall(json.dumps({"status": status}).encode() + b"\n")
    except BrokenPipeError:
        return 1
    return 0


def _receive(client: socket.socket, num_bytes: int, fds: array.array[int]) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more, ancillary, _, _ = client.recvmsg(num_bytes - len(data), socket.CMSG_LEN(3 * fds.itemsize))
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(value)
        if not more:
            raise EOFError("the client has gone")
        data += more
    return data


def _run(request: dict, fds: array.array[int], mask: object) -> int:
    from zeroshard.host.launch.forked import as_executed, run_main

    if request["env"].get("ZEROSHARD_LAUNCHER_PID") == str(request.get("parent")):
        request["env"]["ZEROSHARD_LAUNCHER_PID"] = str(os.getppid())  # who ends with the client, and the client with it
    sys.executable = str(Path(__file__).with_name("forked-python"))
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    as_executed(request["env"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # type: ignore[arg-type]
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # an import has asked for it; the program's own TMPDIR counts
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), encoding="utf-8")
    for name, fd in (("stdout", 1), ("stderr", 2)):
        errors, by_line = ("backslashreplace", True) if fd == 2 else ("strict", os.isatty(fd))
        raw = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        stream = io.TextIOWrapper(raw, encoding="utf-8", errors=errors, line_buffering=by_line)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    observed.begin()
    return run_main(lambda: _python(request["args"]))


def _python(args: list[str]) -> None:
    """``python ARGS``."""
    kind, *words = [word for word in args if word != "-u"] if args[0] == "-u" else args
    if kind == "-m":
        name, *words = words
        sys.path[0] = os.getcwd()
        sys.argv = [name, *words]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        code, *words = words
        sys.path[0] = ""
        sys.argv = ["-c", *words]
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(code, "<string>", "exec"), module.__dict__)
    elif not kind.startswith("-"):
        sys.argv = [kind, *words]
        sys.path[0] = str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")
    elif kind == "-I":  # isolated, with bounds on its memory that torch alone would pass: a real start
        os.execv(PYTHON, [PYTHON, *args])
    else:
        raise ValueError(f"{kind}: only -m, -c and a script can be forked; start a real process")


if __name__ == "__main__":
    main(sys.argv[1])
