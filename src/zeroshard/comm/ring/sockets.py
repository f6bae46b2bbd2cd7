"""A transport for the ring: messages over TCP connections of our own, one for each direction between two ranks.

The sender connects. Each connection has a thread that sends large messages; a small message is sent at once, by the
caller's thread, if nothing is queued before it. The thread that waits for a message reads it, directly into the tensor.

[Note: Few large calls]
    The kernel moves a whole chunk in one call, during which the calling thread sleeps. gloo's event loop instead wakes
    for every few kilobytes that arrive and copies those. Measured on two cores, with this and the last note combined:
    16 to 64 MiB between two ranks took 26 to 36 % less time than a ring over gloo, 64 KiB among four about half of it.

[Note: Who may connect]
    Any process that reaches the port can connect. So each rank puts a secret into the rendezvous store, and keeps a
    connection only after the caller has proved that it knows the secret (`zeroshard.comm.ring.handshake`). Whoever can
    read the store can read the secrets: docs/multi-node.md says what this protects against and what it does not.

[Note: No pacing within a machine]
    If BBR is the system's TCP congestion control, it also controls the loopback interface, where it paces messages by a
    timer at its own estimate of the bandwidth. On loopback nothing is lost and nothing queues up. So connections
    between ranks of one machine use reno, which every kernel has and every user may choose. Between machines we keep
    the system's congestion control.
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, PeerError, Work, own_group
from zeroshard.comm.queued.latch import Latch
from zeroshard.comm.queued.messages import members, own_store
from zeroshard.comm.ring.handshake import MOST_STRANGERS, SECRET_BYTES, Listener, introduce
from zeroshard.host.errors import UserError
from zeroshard.host.finalizers import Finalizer
from zeroshard.host.launch.environment import variable

AT_ONCE_BYTES = 64 << 10  # up to this size the caller's thread sends, as much as the kernel takes without blocking
_HEADER = struct.Struct("!qq")  # topic of a message, and its length in bytes


class SocketTransport:
    """Messages over TCP among the members of a process group, between machines and within one.

    A rank listens at the address of the interface that ``GLOO_SOCKET_IFNAME`` names, else at its address on the route
    to the group's rendezvous store. The constructor is collective over ``group``. Nothing is registered with
    torch.distributed: the connections are closed by `close`, or when the transport is garbage-collected.

    Args:
        group: a process group that this rank belongs to; None: the default group. Its backend does not matter.
        timeout_s: seconds after which waiting for a message fails.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this rank is outside ``group``.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 600.0) -> None:
        parent, rank, world_size = members(group)
        self._join(own_store(parent), rank, range(world_size), timeout_s)

    def _join(self, store: dist.Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        """Listen, and publish this rank's address. ``names``: the ranks' numbers before any split, for messages."""
        self.rank, self.world_size = rank, len(names)
        self.topic = 0
        self._store, self._names, self._timeout_s, self._num_splits = store, names, timeout_s, 0
        self._lines: _Lines | None = None
        if self.world_size > 1:
            self._lines = _Lines(*own_address(store), rank, self.world_size, timeout_s)
            self._forget = Finalizer(self, self._lines.close)
            store.set(_key(rank), json.dumps([*self._lines.address, self._lines.secret.hex()]))
            store.wait([_key(each) for each in range(self.world_size)])

    def split(self, groups: Groups) -> SocketTransport:
        """Return the transport of this rank's group, whose ranks meet under a prefix of their own in the same store."""
        index, ranks = own_group(groups, self.rank)
        part = object.__new__(SocketTransport)
        store = dist.PrefixStore(f"part/{self._num_splits}/{index}", self._store)
        self._num_splits += 1
        part._join(store, ranks.index(self.rank), [self._names[rank] for rank in ranks], self._timeout_s)
        return part

    def send(self, message: Tensor, to: int) -> Work:
        """Send ``message`` to rank ``to``, directly from the tensor's memory."""
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
        """Return a handle whose ``wait`` receives the next message of rank ``source`` into ``buffer``."""
        if self._lines is None:
            raise self._closed()
        return _Arriving(self, self._lines, buffer, source)

    def close(self) -> None:
        """Close the connections."""
        if self._lines is not None:
            self._lines = None
            self._forget()

    def lost(self, peer: int, error: Exception) -> PeerError:
        """Close, so that other ranks notice; return what to raise after ``error`` in a message to or from ``peer``."""
        if isinstance(error, PeerError):
            return error
        peer, own, reason = self._names[peer], self._names[self.rank], self._reason(error)
        # Only a rank's neighbours see that it is gone; theirs then see those neighbours close their connections. The
        # store keeps the number of the rank that was reported first.
        try:
            first = int(self._store.compare_set("lost", "", str(peer)).decode())
        except (RuntimeError, ValueError):  # the store was in the process that is gone
            first = peer
        self.close()  # our neighbours, which wait for us, see the connections close
        if first == own:
            return PeerError(f"rank {own}: rank {peer} waited too long for this rank and gave up ({reason})")
        return PeerError(f"rank {own}: rank {first} is gone or did not answer; see what it printed ({reason})")

    def made_another_call(self, peer: int) -> PeerError:
        """Return what to raise if a message of ``peer`` belongs to another operation than this rank's."""
        return PeerError(f"rank {self._names[peer]} called a different collective than this rank")

    def _closed(self) -> PeerError:
        return PeerError(f"rank {self._names[self.rank]}: the transport is closed")

    def _reason(self, error: Exception) -> str:
        if isinstance(error, BlockingIOError | TimeoutError):
            return f"nothing within {self._timeout_s:g} s"
        return (isinstance(error, OSError) and error.strerror) or str(error).partition("\n")[0]


class _Lines:
    """A rank's connections, and the listener that accepts those of other ranks."""

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
        """Connect to ``rank``, which listens at ``host`` and ``port``, and authenticate."""
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
        """Return the connection from ``rank``; wait until it is there."""
        if rank not in self._incoming:
            with self._came:
                if not self._came.wait_for(lambda: rank in self._incoming or self._is_closed, self._timeout_s):
                    raise TimeoutError
        if self._is_closed:
            raise ConnectionAbortedError("this rank has hung up")
        return self._incoming[rank]

    def close(self) -> None:
        """Close all connections, and wake threads that wait for one; may be called twice."""
        with self._came:
            self._is_closed = True
            lines = [*self._incoming.values(), *(line.socket for line in self.outgoing.values())]
            self._came.notify_all()
        self._listener.close()
        for line in lines:
            with contextlib.suppress(OSError):  # the other side has closed it already
                line.shutdown(socket.SHUT_RDWR)  # wakes a thread that blocks in it; what was sent still arrives
            line.close()
        for outgoing in self.outgoing.values():
            outgoing.end()

    def _keep(self, rank: int, line: socket.socket) -> None:
        """Keep the line on which ``rank`` sends to us, on the listener's thread: [Note: Who may connect]."""
        with contextlib.suppress(OSError):  # it is closed already: reading from it will raise
            _settle(line, socket.SO_RCVTIMEO, self._timeout_s)
        with self._came:
            if self._is_closed:
                line.close()
                return
            self._incoming[rank] = line
            self._came.notify_all()


class _Outgoing:
    """A connection to one peer, and the queue of messages to be sent on it."""

    def __init__(self, line: socket.socket, peer: int) -> None:
        self.socket = line
        self._peer = peer
        self._before: Latch | None = None  # open once the last message has been sent
        self._queue: queue.SimpleQueue[tuple[list[memoryview], _Sent] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, header: bytes, message: Tensor, transport: SocketTransport) -> _Sent:
        """Send ``message`` after all earlier ones."""
        sent = _Sent(transport, message, self._peer)
        before, self._before = self._before, sent.done
        parts = [memoryview(header), _bytes_of(message)]
        if message.nbytes <= AT_ONCE_BYTES and (before is None or before.is_open):
            try:
                parts = _after(parts, self.socket.sendmsg(parts, (), socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass  # the send buffer is full: the thread sends the message
            except OSError as error:
                sent.error, parts = error, []
            if not parts:
                sent.done.open()
                return sent
        if self._thread is None:
            arguments = (self.socket, self._queue)
            self._thread = threading.Thread(target=_send_all, args=arguments, name="ring-sender", daemon=True)
            self._thread.start()
        self._queue.put((parts, sent))
        return sent

    def end(self) -> None:
        """End the sending thread once the queue is empty."""
        self._queue.put(None)


class _Sent:
    """The handle of a message that is being sent; it keeps the tensor alive."""

    __slots__ = ("_message", "_peer", "_transport", "done", "error")

    def __init__(self, transport: SocketTransport, message: Tensor, peer: int) -> None:
        self._transport, self._message, self._peer = transport, message, peer
        self.done = Latch()
        self.error: OSError | None = None

    def wait(self) -> None:
        """Wait until the message has been sent; raise PeerError if that failed."""
        self.done.wait()
        if self.error is not None:
            raise self._transport.lost(self._peer, self.error) from None


class _Arriving:
    """The handle of a message to be received from a peer."""

    __slots__ = ("_buffer", "_lines", "_source", "_topic", "_transport")

    def __init__(self, transport: SocketTransport, lines: _Lines, buffer: Tensor, source: int) -> None:
        self._transport, self._lines, self._source, self._topic = transport, lines, source, transport.topic
        self._buffer: Tensor | None = buffer

    def wait(self) -> None:
        """Receive the message into the tensor; later calls do nothing."""
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


def thread_transports(world_size: int, *, timeout_s: float = 120.0) -> list[SocketTransport]:
    """Return transports between ``world_size`` threads of this process, by rank: a ring in a debugger, or in a test.

    Raises:
        ValueError: ``world_size`` below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    store = dist.HashStore()

    def join(rank: int) -> SocketTransport:
        transport = object.__new__(SocketTransport)
        transport._join(store, rank, range(world_size), timeout_s)
        return transport

    with ThreadPoolExecutor(world_size) as pool:  # each waits until all listen
        return list(pool.map(join, range(world_size)))


def own_address(store: dist.Store) -> tuple[socket.AddressFamily, str]:
    """Return the address at which other ranks reach this one, after its family.

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
    with contextlib.suppress(OSError):  # the name cannot be resolved
        for family, kind, _, _, address in socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as route:
                route.connect(address)  # a datagram socket: nothing is sent
                return family, str(route.getsockname()[0])
    return socket.AF_INET, "127.0.0.1"


def _key(rank: int) -> str:
    return f"address/{rank}"


def _settle(line: socket.socket, which_timeout: int, timeout_s: float) -> None:
    """Disable Nagle's algorithm, use reno within a machine, and have blocking calls fail after ``timeout_s``."""
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_CONGESTION") and line.getpeername()[0] == line.getsockname()[0]:
        with contextlib.suppress(OSError):  # the kernel does not allow it: keep the system's
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")  # [Note: No pacing within a machine]
    line.settimeout(None)
    micros = max(math.ceil(timeout_s * 1e6), 1)
    line.setsockopt(socket.SOL_SOCKET, which_timeout, struct.pack("@ll", *divmod(micros, 1_000_000)))


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a view of a tensor's memory; the caller keeps the tensor alive.

    Not by ``numpy()``: after that, torch would never let the tensor's storage be resized again.
    """
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _fill(line: socket.socket, view: memoryview) -> None:
    while len(view):
        num_bytes = line.recv_into(view, 0, socket.MSG_WAITALL)  # [Note: Few large calls]
        if not num_bytes:
            raise ConnectionResetError("it has hung up")
        view = view[num_bytes:]


def _after(parts: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return ``parts`` without their first ``num_bytes``, which have been sent."""
    left = []
    for part in parts:
        if num_bytes < len(part):
            left.append(part[num_bytes:])
        num_bytes = max(num_bytes - len(part), 0)
    return left


def _send_all(line: socket.socket, waiting: queue.SimpleQueue[Any]) -> None:
    """Send queued messages in order, until None; runs on a thread."""
    while (item := waiting.get()) is not None:
        parts, sent = item
        try:
            while parts:
                parts = _after(parts, line.sendmsg(parts))
        except OSError as error:
            sent.error = error
        sent.done.open()
        del item, parts, sent  # they keep the tensor alive
