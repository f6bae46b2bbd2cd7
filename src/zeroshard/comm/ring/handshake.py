"""Who may connect: both sides of a TCP connection prove that they know the listener's secret, without sending it.

    listener -> caller      32 random bytes
    caller -> listener      its rank, 32 random bytes, HMAC-SHA256(secret, "caller", ranks, both random numbers)
    listener -> caller      HMAC-SHA256(secret, "listener", ranks, both random numbers)

A proof is bound to the two ranks and to this connection, so a recorded one opens no other. One thread serves all
callers at the same time: a silent or slow caller delays no other, and is disconnected after `PATIENCE_S` seconds in
total. Where more than `MOST_STRANGERS` are unproved at once, the oldest is disconnected.

The secret keeps out processes that can merely reach the port. It does not protect against anybody who can read or
change traffic: messages are neither encrypted nor signed, as gloo's and NCCL's are not.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

PATIENCE_S = 10.0  # from a connection to its proof
MOST_STRANGERS = 256  # connections that have not proved anything yet
SECRET_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_RANDOM_BYTES = 32
_HELLO = struct.Struct(f"!I{_RANDOM_BYTES}s{_PROOF_BYTES}s")


class Listener:
    """Accepts connections on a thread of its own, and hands over those that prove themselves.

    Args:
        server: that listens; it is closed with this.
        secret: that callers must know.
        rank, world_size: of who listens. Callers are the other ranks, each of them once.
        accept: called on the thread with a caller's rank and its connection, blocking and without a time limit; who is
            asked must not wait.
    """

    def __init__(
        self,
        server: socket.socket,
        secret: bytes,
        rank: int,
        world_size: int,
        accept: Callable[[int, socket.socket], None],
    ) -> None:
        self._server, self._secret, self._rank, self._accept = server, secret, rank, accept
        self._awaited = set(range(world_size)) - {rank}
        self._strangers: dict[socket.socket, _Stranger] = {}  # in the order in which they came
        self._stop, self._stopped = socket.socketpair()
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="ring-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more; may be called twice."""
        self._stop.close()  # the thread hears of it, and closes all the rest

    def _serve(self) -> None:
        with contextlib.ExitStack() as at_end:
            for each in (self._selector, self._server, self._stopped):
                at_end.callback(each.close)
            at_end.callback(lambda: [line.close() for line in self._strangers])
            while True:
                first = next(iter(self._strangers.values()), None)
                left_s = None if first is None else max(first.hang_up_at - time.monotonic(), 0.0)
                for key, _ in self._selector.select(left_s):
                    if key.fileobj is self._stopped:
                        return
                    if key.fileobj is self._server:
                        self._let_in()
                    elif key.data in self._strangers.values():
                        self._listen_to(key.data)
                now = time.monotonic()
                for stranger in [each for each in self._strangers.values() if each.hang_up_at <= now]:
                    self._hang_up(stranger)

    def _let_in(self) -> None:
        """Take a connection and challenge it."""
        try:
            line, _ = self._server.accept()
        except OSError:  # who had come has gone again
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._hang_up(next(iter(self._strangers.values())))
        line.setblocking(False)
        stranger = self._strangers[line] = _Stranger(line)
        self._selector.register(line, selectors.EVENT_READ, stranger)
        try:
            line.sendall(stranger.challenge)  # into a buffer that is empty
        except OSError:
            self._hang_up(stranger)

    def _listen_to(self, stranger: _Stranger) -> None:
        """Read what has come of its hello, and judge by that once it is there."""
        try:
            part = stranger.line.recv(_HELLO.size - len(stranger.hello))
        except BlockingIOError:
            return
        except OSError:
            part = b""
        stranger.hello += part
        if not part:
            self._hang_up(stranger)
        elif len(stranger.hello) == _HELLO.size:
            rank, random, proof = _HELLO.unpack(stranger.hello)
            ranks = struct.pack("!II", rank, self._rank)
            known = hmac.compare_digest(proof, _proof(self._secret, b"caller", ranks, stranger.challenge, random))
            if known and rank in self._awaited:
                self._keep(stranger, rank, _proof(self._secret, b"listener", ranks, stranger.challenge, random))
            else:
                self._hang_up(stranger)

    def _keep(self, stranger: _Stranger, rank: int, proof: bytes) -> None:
        line = stranger.line
        try:
            line.sendall(proof)
            line.setblocking(True)
        except OSError:
            self._hang_up(stranger)
            return
        self._selector.unregister(line)
        del self._strangers[line]
        self._awaited.remove(rank)
        self._accept(rank, line)

    def _hang_up(self, stranger: _Stranger) -> None:
        self._selector.unregister(stranger.line)
        del self._strangers[stranger.line]
        stranger.line.close()


class _Stranger:
    """A connection that has proved nothing yet."""

    __slots__ = ("challenge", "hang_up_at", "hello", "line")

    def __init__(self, line: socket.socket) -> None:
        self.line, self.hello = line, b""
        self.challenge = secrets.token_bytes(_RANDOM_BYTES)
        self.hang_up_at = time.monotonic() + PATIENCE_S


def introduce(line: socket.socket, secret: bytes, rank: int, peer: int, timeout_s: float) -> None:
    """Prove to the `Listener` of rank ``peer`` that ``rank`` calls, and have it prove that it is that rank.

    Args:
        line: a new connection to it.
        secret: the listener's.
        rank: who calls.
        peer: who listens.
        timeout_s: for all of it.

    Raises:
        OSError: it hung up, took too long, or does not know its secret.
    """
    until = time.monotonic() + timeout_s
    ranks, random = struct.pack("!II", rank, peer), secrets.token_bytes(_RANDOM_BYTES)
    challenge = _receive(line, _RANDOM_BYTES, until)
    line.sendall(_HELLO.pack(rank, random, _proof(secret, b"caller", ranks, challenge, random)))
    answer = _receive(line, _PROOF_BYTES, until)
    if not hmac.compare_digest(answer, _proof(secret, b"listener", ranks, challenge, random)):
        raise ConnectionRefusedError("who answered at its address does not know its secret")


def _proof(secret: bytes, role: bytes, ranks: bytes, challenge: bytes, random: bytes) -> bytes:
    return hmac.digest(secret, b"zeroshard " + role + ranks + challenge + random, hashlib.sha256)


def _receive(line: socket.socket, num_bytes: int, until: float) -> bytes:
    """Exactly so many bytes, by a time of `time.monotonic`, however slowly they come."""
    found = b""
    while len(found) < num_bytes:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        line.settimeout(left_s)
        part = line.recv(num_bytes - len(found))
        if not part:
            raise ConnectionResetError("it has hung up")
        found += part
    return found
