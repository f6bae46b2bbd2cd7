"""Point-to-point messages between ranks: the interface through which the ring uses a network.

A transport moves bytes from one rank's tensor into another's, and guarantees only this: messages from one rank to
another arrive complete and in the order in which they were sent, and neither side's tensor may be touched until its
handle has been waited on. Each message has a topic. A receiver never takes a message of another topic for the one that
it expects: it waits, or fails. There are two transports: TCP connections (`zeroshard.comm.ring.sockets`), and queues in
the memory of one process (`ThreadTransport`), for tests and for debugging a ring.
"""

from __future__ import annotations

import queue
import threading
import weakref
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Groups, PeerError, Work, own_group

CPU = torch.device("cpu")
_num_stores: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


class Transport(Protocol):
    """Messages between ``world_size`` ranks; see the module's docstring for its guarantees."""

    topic: int  # topic of the messages that are sent and received from now on, below 2 ** 31

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
        """Receive from rank ``source`` into ``buffer`` (contiguous, as large as the message); filled after `Work.wait`.

        The caller must wait for receives from one rank in the order in which it posted them.
        """
        ...

    def split(self, groups: Groups) -> Transport:
        """Return a transport among the ranks of this rank's group; see `zeroshard.comm.base.split`."""
        ...

    def close(self) -> None:
        """Close the connections; messages in flight are lost."""
        ...


class _Message:
    """A message in a queue: the sender's own tensor, and an event that is set once the receiver has copied it."""

    __slots__ = ("taken", "tensor", "topic")

    def __init__(self, tensor: Tensor, topic: int) -> None:
        self.tensor = tensor
        self.topic = topic
        self.taken = threading.Event()


class _ThreadSend:
    def __init__(self, sent: _Message, to: int, timeout_s: float) -> None:
        self._message, self._to, self._timeout_s = sent, to, timeout_s

    def wait(self) -> None:
        if not self._message.taken.wait(self._timeout_s):
            raise PeerError(f"rank {self._to} did not take a message within {self._timeout_s:g} s")


class _ThreadRecv:
    def __init__(
        self, messages: queue.SimpleQueue[_Message], buffer: Tensor, topic: int, source: int, timeout_s: float
    ) -> None:
        self._messages, self._buffer, self._topic = messages, buffer, topic
        self._source, self._timeout_s = source, timeout_s

    def wait(self) -> None:
        try:
            sent = self._messages.get(timeout=self._timeout_s)
        except queue.Empty:
            raise PeerError(f"rank {self._source} sent no message within {self._timeout_s:g} s") from None
        if sent.topic != self._topic:
            raise PeerError(f"rank {self._source} called a different collective than this rank")
        assert sent.tensor.nbytes == self._buffer.nbytes, (sent.tensor.shape, self._buffer.shape)
        self._buffer.copy_(sent.tensor)
        sent.taken.set()


_Queues = dict[tuple[int, ...], queue.SimpleQueue[_Message]]  # by part, sender and receiver


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

    def _queue(self, source: int, to: int) -> queue.SimpleQueue[_Message]:
        return self._queues.setdefault((*self._part, source, to), queue.SimpleQueue())  # atomic: ranks are threads

    def send(self, message: Tensor, to: int) -> Work:
        """Put ``message`` itself, not a copy, into the queue to rank ``to``."""
        sent = _Message(message, self.topic)
        self._queue(self.rank, to).put(sent)
        return _ThreadSend(sent, to, self._timeout_s)

    def recv(self, buffer: Tensor, source: int) -> Work:
        """Return a handle whose ``wait`` copies the next message of rank ``source`` into ``buffer``."""
        return _ThreadRecv(self._queue(source, self.rank), buffer, self.topic, source, self._timeout_s)

    def split(self, groups: Groups) -> ThreadTransport:
        """Return a transport over separate queues among the ranks of this rank's group."""
        index, ranks = own_group(groups, self.rank)
        part = (*self._part, self._num_splits, index)
        self._num_splits += 1
        return ThreadTransport(ranks.index(self.rank), len(ranks), self._queues, self._timeout_s, part)

    def close(self) -> None:
        """Do nothing: there are no connections."""


def thread_transports(world_size: int, *, timeout_s: float = 120.0) -> list[ThreadTransport]:
    """Return transports between ``world_size`` threads of this process, by rank.

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
    """Return the group itself (the default one for None), this process's rank in it, and its size.

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
    """Return a store under a new prefix of the group's store. All members must call it, but none waits for another."""
    # members make their communicators in the same order, so the number is the same on all of them
    number = _num_stores.get(parent, 0)
    _num_stores[parent] = number + 1
    return dist.PrefixStore(f"zeroshard/{number}", parent.get_group_store())


def require_cpu(who: str, *tensors: Tensor) -> None:
    """Raise ValueError for a tensor that is not on the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"device: {who} moves CPU tensors, not {tensor.device}'s; use TorchCommunicator for those")
