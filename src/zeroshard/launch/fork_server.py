"""A process with one thread that forks ranks for a launcher that has several threads.

Where machines come and go, a launcher posts its heartbeat from a thread and serves stores, which have threads of their
own, so it must not fork ([Note: What a fork copies] in `forked`). It forks this server before all of that, once
everything that ranks import has been imported; from then on a rank is there in milliseconds, after each loss too.

The ranks are the server's children. The kernel ends the server with the launcher, and the ranks with the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from zeroshard.launch.environment import end_with_starter, with_starter
from zeroshard.launch.forked import ForkedRank, exit_code_of_child, fork_command


class ForkServerLostError(RuntimeError):
    """The process that forks ranks has ended: it was killed, and its ranks with it."""


class ForkServer:
    """Fork a server from this process, which must have one thread; see `zeroshard.launch.forked.can_fork`."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                here.close()
                _serve(there, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        there.close()
        self._socket, self._lines = here, here.makefile("rb")

    def fork(self, words: Sequence[str], env: Mapping[str, str]) -> ForkedRank:
        """Run ``python -m zeroshard WORDS`` with the environment ``env`` and no other.

        Raises:
            ForkServerLostError: the server has been killed.
        """
        return ForkedRank(self._ask({"words": list(words), "env": dict(env)}), self._exit_code)

    def close(self) -> None:
        """End the server; its ranks have ended."""
        self._lines.close()
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _exit_code(self, pid: int) -> int | None:
        try:
            return self._ask({"pid": pid})
        except ForkServerLostError:
            return -signal.SIGKILL  # the kernel has ended its ranks too

    def _ask(self, question: Mapping[str, Any]) -> Any:
        try:
            self._socket.sendall(json.dumps(question).encode() + b"\n")
            answer = self._lines.readline()
        except OSError:
            answer = b""
        if not answer:
            raise ForkServerLostError("the process that forks the ranks of this machine was killed")
        return json.loads(answer)


def _serve(asked: socket.socket, mask: Iterable[int]) -> NoReturn:
    """Answer until the launcher closes its end, with the launcher's signal mask."""
    status = 1
    try:
        os.setsid()  # signals to the launcher's group are the launcher's
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        end_with_starter()
        for line in asked.makefile("rb"):
            question = json.loads(line)
            if "pid" in question:
                answer = exit_code_of_child(question["pid"])
            else:
                answer = fork_command(question["words"], with_starter(question["env"])).pid
            asked.sendall(json.dumps(answer).encode() + b"\n")
        status = 0
    finally:
        os._exit(status)
