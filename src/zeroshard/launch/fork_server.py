"""A single-threaded process that forks ranks for a launcher that has several threads.

A launcher of several machines posts its heartbeat from a thread, and serves stores, which have threads too. So it must
not fork ([Note: What a fork copies] in `forked`). It forks this server before it starts those threads, and after it has
imported everything that ranks import. From then on a rank starts in milliseconds, also after a loss.

The ranks are children of the server. The kernel kills the server when the launcher ends, and the ranks when the server
ends.
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
    """The process that forks ranks was killed, and its ranks with it."""


class ForkServer:
    """Forks a server from this process, which must have a single thread; see `zeroshard.launch.forked.can_fork`."""

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
        """Fork a rank that runs ``python -m zeroshard WORDS``; ``env`` is its complete environment.

        Raises:
            ForkServerLostError: the server has been killed.
        """
        return ForkedRank(self._ask({"words": list(words), "env": dict(env)}), self._exit_code)

    def close(self) -> None:
        """End the server. Call it once its ranks have ended."""
        self._lines.close()
        self._socket.close()
        os.waitpid(self.pid, 0)

    def _exit_code(self, pid: int) -> int | None:
        try:
            return self._ask({"pid": pid})
        except ForkServerLostError:
            return -signal.SIGKILL  # the kernel has killed the server's ranks too

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
    """Answer requests until the launcher closes its end of the socket; ``mask`` is the launcher's signal mask."""
    status = 1
    try:
        os.setsid()  # signals to the launcher's process group shall not reach the server
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
