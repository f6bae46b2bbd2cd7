"""Point-to-point messages between ranks: all that the ring needs of a network.

A transport moves bytes from one rank's tensor into another's and promises nothing but this: messages from one rank to
another arrive whole and in the order in which they were sent, and neither side's tensor may be touched until its
handle has been waited on. Messages have a topic, and one whose topic the receiver does not expect is never taken for
one that it does: it waits, or fails. Three carry our rings: TCP connections of our own (`zeroshard.comm.ring.sockets`),
a gloo process group of our own (`TorchTransport`), and queues in the memory of one process (`ThreadTransport`), for
tests and for rings in a debugger.

[Note: One connection, one direction]
    gloo has one connection for two ranks, which hardly sends while it receives: two ranks that exchange halves over it
    came to 475 Mbit/s on a link of 1 Gbit/s each way, and to 990 over two connections. In a larger ring a rank's
    neighbours are two, and each connection carries one direction anyway.
"""

from __future__ import annotations

import queue
import re
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, PeerError, Work, own_group

CPU = torch.device("cpu")
_GLOO_LINE = re.compile(r"^(?:\[[^]]*:\d+\] )?(.*?)(?:\. .*)?$")  # [file:line] what. advice
_num_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Transport(Protocol):
    """Messages between ``world_size`` ranks; see the module's docstring for what is promised."""

    topic: int  # of what is sent and received from now on, below 2 ** 31

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...

    def send(self, message: Tensor, to: int) -> Work:
        """Send ``message`` (contiguous, not empty) to rank ``to``; after `Work.wait` it may be changed."""
        ...

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Fill ``buffer`` (contiguous, as large as the message) from rank ``source``; there after `Work.wait`.

        Receives from one rank are waited on in the order in which they were posted.
        """
        ...

    def split(self, groups: Groups) -> Transport:
        """Messages of their own among the ranks of a group; see `zeroshard.comm.base.split`."""
        ...

    def close(self) -> None:
        """Give the connections back; messages under way are lost."""
        ...


class GroupTransport(ABC):
    """Messages among the members of a process group: where they meet, what each is called, and whom they blame.

    To build one is collective over ``group``. Nothing of it is registered with torch.distributed: it goes when it is
    closed or forgotten.

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
        """``names``: what each rank is called in messages to the user."""
        self.rank, self.world_size = rank, len(names)
        self.topic = 0
        self._store, self._names, self._timeout_s, self._num_splits = store, names, timeout_s, 0
        self._open()

    def split(self, groups: Groups) -> Self:
        """A transport for each group of ranks, which meets in a corner of the same store."""
        index, ranks = own_group(groups, self.rank)
        part = object.__new__(type(self))
        store = dist.PrefixStore(f"part/{self._num_splits}/{index}", self._store)
        self._num_splits += 1
        part._join(store, ranks.index(self.rank), [self._names[rank] for rank in ranks], self._timeout_s)
        return part

    def lost(self, peer: int, error: Exception) -> PeerError:
        """What to raise after ``error`` in a message to or from ``peer``; tells the other ranks."""
        if isinstance(error, PeerError):
            return error
        peer, own = self._names[peer], self._names[self.rank]
        reason = self._reason(error)
        # Only a neighbour sees that a rank is gone; the next one sees that neighbour leave. The store knows the first.
        try:
            first = int(self._store.compare_set("lost", "", str(peer)).decode())
        except (RuntimeError, ValueError):  # the store went with the rank that kept it
            first = peer
        self.close()  # our neighbours wait for us in vain, and learn it so
        if first == own:
            return PeerError(f"rank {own}: rank {peer} gave this rank up, which did not answer ({reason})")
        return PeerError(f"rank {own}: rank {first} is gone or did not answer; see what it printed ({reason})")

    def name_of(self, rank: int) -> int:
        """What the user calls ``rank``: its number before any split."""
        return self._names[rank]

    def closed(self) -> PeerError:
        """What to raise where somebody asks for more."""
        return PeerError(f"rank {self._names[self.rank]}: the transport is closed")

    @abstractmethod
    def _open(self) -> None:
        """Get ready to talk; collective, and no connections where there is one rank."""

    @abstractmethod
    def _reason(self, error: Exception) -> str:
        """``error`` in a few words."""

    @abstractmethod
    def close(self) -> None:
        """Give the connections back; messages under way are lost."""


class _Message:
    """A gloo message under way to or from one peer; the tensor lives as long as it."""

    __slots__ = ("_handle", "_peer", "_tensor", "_transport")

    def __init__(self, handle: Any, tensor: Tensor, peer: int, transport: TorchTransport) -> None:
        self._handle = handle
        self._tensor = tensor
        self._peer = peer
        self._transport = transport

    def wait(self) -> None:
        try:
            self._handle.wait()
        except RuntimeError as error:
            raise self._transport.lost(self._peer, error) from None


class TorchTransport(GroupTransport):
    """Messages over a gloo process group of its own, which never mix with other traffic; see `GroupTransport`."""

    def _open(self) -> None:
        self._groups: dict[str, Any] | None = None  # ProcessGroupGloo, whose stub lacks send and recv, by direction
        if self.world_size > 1:
            timeout = timedelta(seconds=self._timeout_s)
            up = dist.ProcessGroupGloo(self._store, self.rank, self.world_size, timeout)
            down = up  # [Note: One connection, one direction]
            if self.world_size == 2:
                down = dist.ProcessGroupGloo(dist.PrefixStore("down", self._store), self.rank, 2, timeout)
            self._groups = {"up": up, "down": down}
            # who has connected may not leave before all have: the others would find it gone
            self._store.set(f"connected/{self.rank}", "")
            self._store.wait([f"connected/{rank}" for rank in range(self.world_size)])

    def send(self, message: Tensor, to: int) -> Work:
        """Send ``message`` to rank ``to``; gloo reads it where it lies."""
        try:
            return _Message(self._way(self.rank, to).send([message], to, self.topic), message, to, self)
        except RuntimeError as error:
            raise self.lost(to, error) from None

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Fill ``buffer`` from rank ``source``; gloo writes it where it lies."""
        try:
            return _Message(self._way(source, self.rank).recv([buffer], source, self.topic), buffer, source, self)
        except RuntimeError as error:
            raise self.lost(source, error) from None

    def close(self) -> None:
        """Leave the group."""
        self._groups = None

    def _reason(self, error: Exception) -> str:
        return _GLOO_LINE.sub(r"\1", str(error).splitlines()[0])

    def _way(self, source: int, to: int) -> Any:
        """The group that carries messages from ``source`` to ``to``."""
        if self._groups is None:
            raise self.closed()
        return self._groups["up" if source < to else "down"]


class _Parcel:
    """A message in a queue: the sender's own tensor, and whether its reader is done with it."""

    __slots__ = ("taken", "tensor", "topic")

    def __init__(self, tensor: Tensor, topic: int) -> None:
        self.tensor = tensor
        self.topic = topic
        self.taken = threading.Event()


class _ThreadSend:
    def __init__(self, parcel: _Parcel, to: int, timeout_s: float) -> None:
        self._parcel, self._to, self._timeout_s = parcel, to, timeout_s

    def wait(self) -> None:
        if not self._parcel.taken.wait(self._timeout_s):
            raise PeerError(f"rank {self._to} did not take a message within {self._timeout_s:g} s")


class _ThreadRecv:
    def __init__(
        self, parcels: queue.SimpleQueue[_Parcel], buffer: Tensor, topic: int, source: int, timeout_s: float
    ) -> None:
        self._parcels, self._buffer, self._topic = parcels, buffer, topic
        self._source, self._timeout_s = source, timeout_s

    def wait(self) -> None:
        try:
            parcel = self._parcels.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(f"rank {self._source} sent no message within {self._timeout_s:g} s") from None
        if parcel.topic != self._topic:
            raise PeerError(f"rank {self._source} made another call than this rank")
        assert parcel.tensor.nbytes == self._buffer.nbytes, (parcel.tensor.shape, self._buffer.shape)
        self._buffer.copy_(parcel.tensor)
        parcel.taken.set()


_Queues = dict[tuple[int, ...], queue.SimpleQueue[_Parcel]]  # by part, sender and receiver


class ThreadTransport:
    """One rank's end of the queues that `thread_transports` makes."""

    def __init__(
        self, rank: int, world_size: int, queues: _Queues, timeout_s: float, part: tuple[int, ...] = ()
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.topic = 0
        self._queues = queues
        self._timeout_s = timeout_s
        self._part = part
        self._num_splits = 0

    def _queue(self, source: int, to: int) -> queue.SimpleQueue[_Parcel]:
        return self._queues.setdefault((*self._part, source, to), queue.SimpleQueue())  # atomic: ranks are threads

    def send(self, message: Tensor, to: int) -> Work:
        """Put ``message`` itself, not a copy, where rank ``to`` finds it."""
        parcel = _Parcel(message, self.topic)
        self._queue(self.rank, to).put(parcel)
        return _ThreadSend(parcel, to, self._timeout_s)

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Copy the next message from rank ``source`` when waited on."""
        return _ThreadRecv(self._queue(source, self.rank), buffer, self.topic, source, self._timeout_s)

    def split(self, groups: Groups) -> ThreadTransport:
        """Queues of their own for the ranks of a group."""
        index, ranks = own_group(groups, self.rank)
        part = (*self._part, self._num_splits, index)
        self._num_splits += 1
        return ThreadTransport(ranks.index(self.rank), len(ranks), self._queues, self._timeout_s, part)

    def close(self) -> None:
        """Nothing to give back."""


def thread_transports(world_size: int, *, timeout_s: float = 120.0) -> list[ThreadTransport]:
    """The ends, by rank, of queues between ``world_size`` threads of this process.

    Args:
        world_size: at least 1.
        timeout_s: how long a rank waits for a peer.

    Raises:
        ValueError: ``world_size`` below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size: {world_size} ranks; give at least 1")
    queues: _Queues = {}
    return [ThreadTransport(rank, world_size, queues, timeout_s) for rank in range(world_size)]


def members(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, int, int]:
    """The group itself (the default one for None), this process's rank in it, and its size.

    Raises:
        RuntimeError: `torch.distributed` is not initialised, or this process is no member.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
            "or use LocalCommunicator() for one process"
        )
    parent = group if group is not None else dist.group.WORLD
    assert parent is not None
    rank = dist.get_rank(parent)
    if rank < 0:
        raise RuntimeError("this process is no member of the group; build the communicator on its members only")
    return parent, rank, dist.get_world_size(parent)


def own_store(parent: dist.ProcessGroup) -> dist.Store:
    """A corner of the group's store that nobody else writes to. Collective, but waits for nobody."""
    # the members of a group ask in one order, so the number is the same on all of them
    number = _num_stores.get(parent, 0)
    _num_stores[parent] = number + 1
    return dist.PrefixStore(f"zeroshard/{number}", parent.get_group_store())


def require_cpu(who: str, *tensors: Tensor) -> None:
    """Raise ValueError for a tensor that does not live in the CPU's memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"device: {who} moves CPU tensors, not {tensor.device}'s; use TorchCommunicator for those")
