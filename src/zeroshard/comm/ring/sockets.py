"""Messages over TCP connections of our own, one for each direction between two ranks that communicate.

The sender connects. Each connection has a thread that sends large messages; a small message with nothing queued before
it is sent at once. The thread that waits for a message reads it, from the kernel straight into the tensor.

[Note: Few large calls]
    The kernel moves a whole chunk in one call, during which the calling thread sleeps. gloo's event loop instead wakes
    for every few kilobytes that arrive and copies those. Measured on two cores, and together with the last note here:
    16 to 64 MiB between two ranks took 26 to 36 % less time than a ring over gloo, 64 KiB among four about half of it.

[Note: Who may connect]
    Any process that reaches the port can connect. So each rank puts a secret into the rendezvous store, and keeps a
    connection only after the caller has proved that it knows the secret (`zeroshard.comm.ring.handshake`). Whoever can
    read the store can read the secrets: docs/multi-node.md says what this protects from and what it does not.

[Note: No pacing within a machine]
    Where BBR governs TCP it does so on the loopback interface too, and spaces messages out by a timer at the bandwidth
    that it believes to see. Nothing is lost there and nothing queues up, so connections between ranks of one machine go
    by reno, which every kernel has and lets everybody choose. Between machines the administrator's choice stands.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import queue
import secrets
import socket
import struct
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, PeerError, Work, own_group
from zeroshard.comm.queued.messages import members, own_store
from zeroshard.comm.ring.handshake import MOST_STRANGERS, SECRET_BYTES, Listener, introduce
from zeroshard.errors import UserError
from zeroshard.launch.environment import variable

AT_ONCE_BYTES = 64 << 10  # up to it a message leaves without its thread, as far as the kernel takes it
_HEADER = struct.Struct("!qq")  # topic and bytes of a message


class SocketTransport:
    """Messages over TCP among the members of a process group, between machines and within one.

    A rank is called at the address of the interface that ``GLOO_SOCKET_IFNAME`` names, else at the one on the way to
    the store at which the ranks have met. To build one is collective over ``group``. Nothing of it is registered with
    torch.distributed: it goes when it is closed or forgotten.

    Args:
        group: a process group that this rank belongs to; None: the default group. Its backend does not matter.
        timeout_s: after which a message that never came fails.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        parent, rank, world_size = members(group)
        self._join(own_store(parent), rank, range(world_size), timeout_s)

    def _join(self, store: dist.Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        """``names``: what each rank is called in messages to the user: its number before any split."""
        self.rank, self.world_size = rank, len(names)
        self.topic = 0
        self._store, self._names, self._timeout_s, self._num_splits = store, names, timeout_s, 0
        self._lines: _Lines | None = None
        if self.world_size > 1:
            self._lines = _Lines(*own_address(store), rank, self.world_size, timeout_s)
            self._forget = weakref.finalize(self, self._lines.close)
            store.set(_key(rank), json.dumps([*self._lines.address, self._lines.secret.hex()]))
            store.wait([_key(each) for each in range(self.world_size)])

    def split(self, groups: Groups) -> SocketTransport:
        """A transport for each group of ranks, which meets in a corner of the same store."""
        index, ranks = own_group(groups, self.rank)
        part = object.__new__(SocketTransport)
        store = dist.PrefixStore(f"part/{self._num_splits}/{index}", self._store)
        self._num_splits += 1
        part._join(store, ranks.index(self.rank), [self._names[rank] for rank in ranks], self._timeout_s)
        return part

    def send(self, message: Tensor, to: int) -> Work:
        """Send ``message`` to rank ``to``, from where it lies."""
        if self._lines is None:
            raise self._closed()
        try:
            line = self._lines.outgoing.get(to)
            if line is None:
                host, port, secret = json.loads(self._store.get(_key(to)))
                line = self._lines.call(to, host, port, bytes.fromhex(secret))
        except (OSError, RuntimeError, ValueError, TypeError) as error:  # the store's errors are RuntimeErrors
            raise self.lost(to, error) from None
        return line.send(_HEADER.pack(self.topic, message.nbytes), message, self)

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Fill ``buffer`` from rank ``source`` when waited on."""
        if self._lines is None:
            raise self._closed()
        return _Arriving(self, self._lines, buffer, source)

    def close(self) -> None:
        """Close the connections."""
        if self._lines is not None:
            self._lines = None
            self._forget()

    def lost(self, peer: int, error: Exception) -> PeerError:
        """What to raise after ``error`` in a message to or from ``peer``; tells the other ranks."""
        if isinstance(error, PeerError):
            return error
        peer, own, reason = self._names[peer], self._names[self.rank], self._reason(error)
        # Only a neighbour sees that a rank is gone; the next one sees that neighbour leave. The store knows the first.
        try:
            first = int(self._store.compare_set("lost", "", str(peer)).decode())
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            first = peer
        self.close()  # our neighbours wait for us in vain, and learn it so
        if first == own:
            return PeerError(f"rank {own}: rank {peer} gave this rank up, which did not answer ({reason})")
        return PeerError(f"rank {own}: rank {first} is gone or did not answer; see what it printed ({reason})")

    def made_another_call(self, peer: int) -> PeerError:
        """What to raise where a message of ``peer`` belongs to another call than this rank's."""
        return PeerError(f"rank {self._names[peer]} made another call than this rank")

    def _closed(self) -> PeerError:
        return PeerError(f"rank {self._names[self.rank]}: the transport is closed")

    def _reason(self, error: Exception) -> str:
        if isinstance(error, BlockingIOError | TimeoutError):
            return f"nothing within {self._timeout_s:g} s"
        return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


class _Lines:
    """A rank's connections, and the listener to which others connect."""

    def __init__(self, family: socket.AddressFamily, host: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.outgoing: dict[int, _Outgoing] = {}
        self.secret = secrets.token_bytes(SECRET_BYTES)
        self._rank, self._timeout_s = rank, timeout_s
        self._incoming: dict[int, socket.socket] = {}
        self._came = threading.Condition()
        self._is_closed = False
        server = socket.create_server((host, 0), family=family, backlog=MOST_STRANGERS)
        self.address: tuple[str, int] = server.getsockname()[:2]
        self._listener = Listener(server, self.secret, rank, world_size, self._keep)

    def call(self, rank: int, host: str, port: int, secret: bytes) -> _Outgoing:
        """Connect to ``rank``."""
        line = socket.create_connection((host, port), timeout=self._timeout_s)
        try:
            introduce(line, secret, self._rank, rank, self._timeout_s)
            _settle(line, socket.SO_SNDTIMEO, self._timeout_s)
        except BaseException:
            line.close()
            raise
        self.outgoing[rank] = _Outgoing(line, rank)
        return self.outgoing[rank]

    def from_(self, rank: int) -> socket.socket:
        """The connection from ``rank``, once it has come."""
        if rank not in self._incoming:
            with self._came:
                if not self._came.wait_for(lambda: rank in self._incoming or self._is_closed, self._timeout_s):
                    raise TimeoutError
        if self._is_closed:
            raise ConnectionAbortedError("this rank has hung up")
        return self._incoming[rank]

    def close(self) -> None:
        """Close all, and wake waiting threads; may be called twice."""
        with self._came:
            self._is_closed = True
            lines = [*self._incoming.values(), *(line.socket for line in self.outgoing.values())]
            self._came.notify_all()
        self._listener.close()
        for line in lines:
            with contextlib.suppress(OSError):  # the other side was faster
                line.shutdown(socket.SHUT_RDWR)  # wakes a thread that sits in it; what was sent still arrives
            line.close()
        for outgoing in self.outgoing.values():
            outgoing.end()

    def _keep(self, rank: int, line: socket.socket) -> None:
        """On the listener's thread: keep the connection on which ``rank`` sends."""
        with contextlib.suppress(OSError):  # it is gone already, which who reads from it will be told
            _settle(line, socket.SO_RCVTIMEO, self._timeout_s)
        with self._came:
            if self._is_closed:
                line.close()
                return
            self._incoming[rank] = line
            self._came.notify_all()


class _Outgoing:
    """A connection to one peer, and the messages that wait to leave on it."""

    def __init__(self, line: socket.socket, peer: int) -> None:
        self.socket = line
        self._peer = peer
        self._before: threading.Event | None = None  # of the last message: set once it has left
        self._queue: queue.SimpleQueue[tuple[list[memoryview], _Sent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, header: bytes, message: Tensor, transport: SocketTransport) -> _Sent:
        """Send ``message`` after all earlier ones."""
        sent = _Sent(transport, message, self._peer)
        before, self._before = self._before, sent.done
        parts = [memoryview(header), _bytes_of(message)]
        if message.nbytes <= AT_ONCE_BYTES and (before is None or before.is_set()):
            try:
                parts = _after(parts, self.socket.sendmsg(parts, (), socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass  # no room for a byte: the thread waits for it
            except OSError as error:
                sent.error, parts = error, []
            if not parts:
                sent.done.set()
                return sent
        if self._thread is None:
            arguments = (self.socket, self._queue)
            self._thread = threading.Thread(target=_send_all, args=arguments, name="ring-sender", daemon=True)
            self._thread.start()
        self._queue.put((parts, sent))
        return sent

    def end(self) -> None:
        """End the thread."""
        self._queue.put(None)


class _Sent:
    """A message that is being sent; it keeps the tensor alive."""

    __slots__ = ("_message", "_peer", "_transport", "done", "error")

    def __init__(self, transport: SocketTransport, message: Tensor, peer: int) -> None:
        self._transport, self._message, self._peer = transport, message, peer
        self.done = threading.Event()
        self.error: OSError | None = None

    def wait(self) -> None:
        """Wait until it has been sent."""
        self.done.wait()
        if self.error is not None:
            raise self._transport.lost(self._peer, self.error) from None


class _Arriving:
    """A message to be read from a peer."""

    __slots__ = ("_buffer", "_lines", "_source", "_topic", "_transport")

    def __init__(self, transport: SocketTransport, lines: _Lines, buffer: Tensor, source: int) -> None:
        self._transport, self._lines, self._source, self._topic = transport, lines, source, transport.topic
        self._buffer: Tensor | None = buffer

    def wait(self) -> None:
        """Read the message into the tensor; later calls do nothing."""
        if self._buffer is None:
            return
        try:
            line, header = self._lines.from_(self._source), bytearray(_HEADER.size)
            _fill(line, memoryview(header))
            topic, num_bytes = _HEADER.unpack(header)
            if (topic, num_bytes) != (self._topic, self._buffer.nbytes):
                raise self._transport.made_another_call(self._source)
            _fill(line, _bytes_of(self._buffer))
        except (OSError, PeerError) as error:
            raise self._transport.lost(self._source, error) from None
        self._buffer = None


def own_address(store: dist.Store) -> tuple[socket.AddressFamily, str]:
    """At which other ranks reach this one, and its family.

    Raises:
        UserError: ``GLOO_SOCKET_IFNAME`` names no interface that has an address.
    """
    wanted = variable("GLOO_SOCKET_IFNAME")
    if wanted:
        found = psutil.net_if_addrs()
        for family in (socket.AF_INET, socket.AF_INET6):
            for name in wanted.split(","):
                for each in found.get(name, ()):
                    if each.family == family:
                        return family, each.address
        raise UserError("GLOO_SOCKET_IFNAME", f"{wanted!r} has no address", f"choose one of {', '.join(sorted(found))}")
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, dist.TCPStore) else socket.gethostname()
    with contextlib.suppress(OSError):  # a name that leads nowhere
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as route:
                route.connect(address)  # a datagram socket: nothing is sent
                return family, str(route.getsockname()[0])
    return socket.AF_INET, "127.0.0.1"


def _key(rank: int) -> str:
    return f"address/{rank}"


def _settle(line: socket.socket, which_timeout: int, timeout_s: float) -> None:
    """Disable Nagle's algorithm; calls block, in the kernel, for ``timeout_s`` at most."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and line.getpeername()[0] == line.getsockname()[0]:
        with contextlib.suppress(OSError):  # a kernel that has no such choice keeps its own
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # [Note: No pacing within a machine]
    line.settimeout(None)
    micros = max(math.ceil(timeout_s * 1e6), 1)
    line.setsockopt(socket.SOL_SOCKET, which_timeout, struct.pack("@ll", *divmod(micros, 1_000_000)))


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, which the caller keeps; ``numpy()`` would forbid its storage to be resized for ever."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill(line: socket.socket, view: memoryview) -> None:
    while len(view):
        num_bytes = line.recv_into(view, 0, socket.MSG_WAITALL)
        if not num_bytes:
            raise ConnectionResetError("it has hung up")
        view = view[num_bytes:]


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``parts`` once ``num_bytes`` have left."""
    left = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(num_bytes - len(part), 0)
    return left


def _send_all(line: socket.socket, waiting: queue.SimpleQueue[Any]) -> None:
    """On a thread: messages in the order in which they were given, until None."""
    while (item := waiting.get()) is not None:
        parts, sent = item
        try:
            while parts:
                parts = _after(parts, line.sendmsg(parts))
        except OSError as error:
            sent.error = error
        sent.done.set()
        del item, parts, sent  # it holds a tensor
