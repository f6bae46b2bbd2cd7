"""Authenticates TCP connections: both sides prove that they know the listener's secret, without sending it.

    listener -> caller      32 random bytes
    caller -> listener      its rank, 32 random bytes, HMAC-SHA256(secret, "caller", ranks, both random numbers)
    listener -> caller      HMAC-SHA256(secret, "listener", ranks, both random numbers)

A proof is bound to the two ranks and to this connection, so a recorded one is useless on any other. One thread serves
all callers concurrently: a silent or slow caller delays no other, and is disconnected `PATIENCE_S` seconds after it
connected. If there are `MOST_STRANGERS` unauthenticated connections when another arrives, the oldest is disconnected.

The secret keeps out processes that can merely reach the port. It does not protect against anybody who can read or
change traffic: like gloo's and NCCL's, messages are neither encrypted nor signed.
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

PATIENCE_S = 10.0  # from a caller's connection to its proof
MOST_STRANGERS = 256  # the most connections that are unauthenticated at the same time
SECRET_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_RANDOM_BYTES = 32
_HELLO = struct.Struct(f"!I{_RANDOM_BYTES}s{_PROOF_BYTES}s")


class Listener:
    """Accepts connections on a thread of its own, and hands over those that have authenticated themselves.

    Args:
        server: the listening socket; `close` closes it.
        secret: the secret that callers must know.
        rank: the rank that listens. Each other rank may connect once.
        world_size: how many ranks there are.
        accept: called on the listener's thread with a caller's rank and its socket, which is in blocking mode without
            a timeout. It must return quickly.
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
        self._strangers: dict[socket.socket, _UnverifiedConnection] = {}  # in the order in which they came
        self._stop, self._stopped = socket.socketpair()
        server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(self._stopped, selectors.EVENT_READ)
        threading.Thread(target=self._serve, name="ring-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more; may be called twice."""
        self._stop.close()  # the thread sees the other end close, and closes everything else

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
        """Accept a connection and send it a challenge."""
        try:
            line, _ = self._server.accept()
        except OSError:  # the caller has disconnected already
            return
        if len(self._strangers) >= MOST_STRANGERS:
            self._hang_up(next(iter(self._strangers.values())))
        line.setblocking(False)
        stranger = self._strangers[line] = _UnverifiedConnection(line)
        self._selector.register(line, selectors.EVENT_READ, stranger)
        try:
            line.sendall(stranger.challenge)  # does not block: the send buffer is empty
        except OSError:
            self._hang_up(stranger)

    def _listen_to(self, stranger: _UnverifiedConnection) -> None:
        """Read what has arrived of the caller's answer; once it is complete, verify it and keep or drop the caller."""
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

    def _keep(self, stranger: _UnverifiedConnection, rank: int, proof: bytes) -> None:
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

    def _hang_up(self, stranger: _UnverifiedConnection) -> None:
        self._selector.unregister(stranger.line)
        del self._strangers[stranger.line]
        stranger.line.close()


class _UnverifiedConnection:
    """A connection whose caller has not authenticated itself yet."""

    __slots__ = ("challenge", "hang_up_at", "hello", "line")

    def __init__(self, line: socket.socket) -> None:
        self.line, self.hello = line, b""
        self.challenge = secrets.token_bytes(_RANDOM_BYTES)
        self.hang_up_at = time.monotonic() + PATIENCE_S


def introduce(line: socket.socket, secret: bytes, rank: int, peer: int, timeout_s: float) -> None:
    """Authenticate ``rank`` to the `Listener` of rank ``peer``, and verify that the listener is rank ``peer``.

    Args:
        line: a new connection to the listener.
        secret: the listener's secret.
        rank: the rank that calls: this one.
        peer: the rank that listens.
        timeout_s: limit for the whole handshake.

    Raises:
        OSError: the listener disconnected, took too long, or does not know its secret.
    """
    until = time.monotonic() + timeout_s
    ranks, random = struct.pack("!II", rank, peer), secrets.token_bytes(_RANDOM_BYTES)
    challenge = _receive(line, _RANDOM_BYTES, until)
    line.sendall(_HELLO.pack(rank, random, _proof(secret, b"caller", ranks, challenge, random)))
    answer = _receive(line, _PROOF_BYTES, until)
    if not hmac.compare_digest(answer, _proof(secret, b"listener", ranks, challenge, random)):
        raise ConnectionRefusedError("the process that answered at its address does not know its secret")


def _proof(secret: bytes, role: bytes, ranks: bytes, challenge: bytes, random: bytes) -> bytes:
    return hmac.digest(secret, b"zeroshard " + role + ranks + challenge + random, hashlib.sha256)


def _receive(line: socket.socket, num_bytes: int, until: float) -> bytes:
    """Return exactly ``num_bytes``; raise TimeoutError if they have not all arrived at time ``until`` (monotonic)."""
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
