"""Authenticates TCP connections: both sides prove that they know the listener's secret, without sending it.

    listener -> caller      32 random bytes
    caller -> listener      its rank, 32 random bytes, HMAC-SHA256(secret, "caller", ranks, both random numbers)
    listener -> caller      HMAC-SHA256(secret, "listener", ranks, both random numbers)

A proof is bound to the two ranks and to this connection, so a recorded one is useless on any other. Each caller is
heard on a thread of its own: a silent or slow one delays no other, and is disconnected `PATIENCE_S` seconds after it
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
        accept: called on a caller's own thread with its rank and its socket, which is in blocking mode without a
            timeout. It must return quickly.
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
        self._lock = threading.Lock()  # of the next two
        self._awaited = set(range(world_size)) - {rank}
        self._strangers: dict[socket.socket, None] = {}  # connections without proof, in the order in which they came
        self._stop, self._stopped = socket.socketpair()
        threading.Thread(target=self._serve, name="ring-listener", daemon=True).start()

    def close(self) -> None:
        """Accept no more; may be called twice."""
        self._stop.close()  # the thread sees the other end close, and closes everything else

    def _serve(self) -> None:
        with self._server, self._stopped, selectors.DefaultSelector() as selector:
            for each in (self._server, self._stopped):
                selector.register(each, selectors.EVENT_READ)
            self._server.setblocking(False)
            while all(key.fileobj is self._server for key, _ in selector.select()):
                try:
                    line, _ = self._server.accept()
                except OSError:  # the caller has disconnected already
                    continue
                with self._lock:
                    if len(self._strangers) >= MOST_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        _hang_up(oldest)
                    self._strangers[line] = None
                threading.Thread(target=self._answer, args=(line,), name="ring-caller", daemon=True).start()
        with self._lock:
            for line in self._strangers:
                _hang_up(line)

    def _answer(self, line: socket.socket) -> None:
        """Challenge a caller, and keep or close its connection; runs on a thread of its own."""
        until, challenge = time.monotonic() + PATIENCE_S, secrets.token_bytes(_RANDOM_BYTES)
        try:
            line.settimeout(PATIENCE_S)
            line.sendall(challenge)
            rank, random, proof = _HELLO.unpack(_receive(line, _HELLO.size, until))
            ranks = struct.pack("!II", rank, self._rank)
            known = hmac.compare_digest(proof, _proof(self._secret, b"caller", ranks, challenge, random))
            with self._lock:
                if not known or rank not in self._awaited:
                    raise ConnectionRefusedError
                line.sendall(_proof(self._secret, b"listener", ranks, challenge, random))
                self._awaited.remove(rank)
            line.settimeout(None)
        except OSError:
            line.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(line, None)
        self._accept(rank, line)


def _hang_up(line: socket.socket) -> None:
    """Wake the thread that hears this caller, which then closes the connection."""
    with contextlib.suppress(OSError):  # the caller has hung up
        line.shutdown(socket.SHUT_RDWR)


def introduce(line: socket.socket, secret: bytes, rank: int, peer: int, timeout_s: float) -> None:
    """Authenticate ``rank`` to the `Listener` of rank ``peer``, and verify that the listener is rank ``peer``.

    Args:
        line: a new connection to the listener.
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
