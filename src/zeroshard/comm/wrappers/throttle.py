"""Simulates a slower network than there is: every operation takes as long as on a ring over given links.

`ThrottledCommunicator` has its inner communicator move the bytes, and makes `Work.wait` return no earlier than they
would have arrived. Nothing sleeps before that, so computation between issue and wait overlaps with the delay, as it
would with a real network's. W ranks form a ring. Links are full duplex, and each direction is charged for the bytes
that pass through it (N: bytes of the unsharded tensor, alpha: latency of a link, B: bytes per second in one direction):

    reduce_scatter, all_gather    (W - 1) alpha       +  (W - 1) / W  N / B
    all_reduce                    2 (W - 1) alpha     +  2 (W - 1) / W  N / B
    all_to_all                    alpha               +  (W - 1) / W  N / B          from each to each at once
    broadcast                     (W - 1) alpha       +  N / B                       a chain, in chunks
    barrier                       ceil(log2 W) alpha                                 dissemination

Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", 2005, section 4, with
the bandwidth terms of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.

[Note: When a transfer begins]
    A collective begins when the last rank has issued it, but a rank knows only when it did so itself. So each operation
    is followed by an all-reduce, the maximum of the times of issue. Without it the delay would count from the rank's
    own issue, and the time that it waits for a slow rank would be deducted from the delay. Times are read from the
    host's monotonic clock. Ranks of several hosts have no common one: a rank that receives a time in its future raises.

[Note: What shares a link]
    Operations of one communicator run one after another, as on a ring's thread and on a NCCL stream. Operations of its
    parts share the rank's link between nodes with them, through one token bucket. A node has one link to the others. If
    several ranks of a node are in rings of their own that leave the node (replicas that shard inside their nodes), the
    rings share that link equally. In an all-to-all each of a node's k ranks sends a part to each of the W - k ranks
    outside: k (W - k) / W N bytes leave the node.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from zeroshard.comm.base import Communicator, Groups, Work, own_group
from zeroshard.comm.labels import CONTROL, labelled
from zeroshard.comm.queued.messages import require_cpu
from zeroshard.comm.wrappers.wrapper import Wrapper

SPIN_S = 100e-6  # a sleep may end so much too late; so we spin for the last part of a delay
_NS = 1e9


@dataclass(frozen=True)
class Link:
    """One direction of a link.

    Raises:
        ValueError: a negative latency or burst, or a bandwidth that is not above 0.
    """

    latency_s: float = 0.0  # seconds from one end to the other
    bytes_per_s: float = math.inf  # bandwidth; infinite if it is not limited
    burst_bytes: int = 0  # bytes that pass at once after a pause: the size of a traffic shaper's token bucket

    def __post_init__(self) -> None:
        if not self.latency_s >= 0 or math.isinf(self.latency_s):
            raise ValueError(f"latency_s: {self.latency_s} is no time; give seconds, 0 or more")
        if not self.bytes_per_s > 0:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s} lets nothing pass; give more than 0")
        if self.burst_bytes < 0:
            raise ValueError(f"burst_bytes must be at least 0, got {self.burst_bytes}")


def bytes_per_link(op: str, num_bytes: int, world_size: int) -> float:
    """Return the bytes that ``op`` sends in one direction of each link of a ring, of a tensor of ``num_bytes``."""
    once = num_bytes * (world_size - 1) / world_size
    return {
        "reduce_scatter": once,
        "all_gather": once,
        "all_to_all": once,
        "all_reduce": 2 * once,
        "broadcast": num_bytes,
    }.get(op, 0)


def num_hops(op: str, world_size: int) -> int:
    """Return how many messages of ``op`` are sent one after another: how often it pays a link's latency."""
    once = world_size - 1
    if op == "all_to_all":
        return min(once, 1)
    if op == "barrier":
        return once.bit_length()  # ceil(log2 W)
    return 2 * once if op == "all_reduce" else once


class _Bucket:
    """The token bucket of one direction of a link, stored as the time until which its tokens are spent."""

    def __init__(self) -> None:
        self._spent_until = -math.inf

    def reserve(self, start_s: float, seconds: float, burst_s: float) -> float:
        """Charge a transfer that takes ``seconds`` and begins at ``start_s`` or later; return the time of its end."""
        self._spent_until = max(start_s - burst_s, self._spent_until) + seconds
        return max(start_s, self._spent_until)


class ThrottledCommunicator(Wrapper):
    """``inner``, slowed down to a ring over ``link`` between nodes; the links within a node add no delay.

    Results have the bits of the inner communicator's. A world of one rank has no links.

    Args:
        inner: the communicator that moves the bytes; the faster it is, the more exact are the delays. All its ranks
            must run on one host.
        link: the links between nodes; each node has one.
        node_size: how many neighbouring ranks form a node; 1: every rank is a node.

    Attributes:
        exchanged: what all ranks of this rank's node send out of it in an all-to-all, as a multiple of one rank's
            tensor. 0: no rank of this communicator is in another node.

    Raises:
        ValueError: ``node_size`` below 1.
    """

    def __init__(self, inner: Communicator, link: Link, *, node_size: int = 1) -> None:
        if node_size < 1:
            raise ValueError(f"node_size must be at least 1, got {node_size}")
        super().__init__(inner)
        self._link, self._bucket, self._node_size = link, _Bucket(), node_size
        self._begin(range(inner.world_size), 1)

    def _begin(self, names: Sequence[int], num_rings: int) -> None:
        """Set up for ranks whose numbers in the unsplit world are ``names``, and ``num_rings`` on the node's link.

        See [Note: What shares a link].
        """
        self._names, self._num_rings = names, num_rings
        node, size = self._node_of(names[self.rank]), len(names)
        here = sum(self._node_of(name) == node for name in names)
        self.exchanged = here * (size - here) / size
        self._unresolved: deque[_Delayed] = deque()
        self._resolving = threading.Lock()
        self._last_s = -math.inf  # when the last operation ends

    def split(self, groups: Groups) -> Self:
        """Split the inner communicator, and return this rank's part, slowed down by the same links."""
        part = super().split(groups)
        named = [[self._names[rank] for rank in ranks] for ranks in groups]
        index, _ = own_group(groups, self.rank)
        node = self._node_of(self._names[self.rank])
        through_node = [names for names in named if node in map(self._node_of, names)]
        leaving = sum(len(set(map(self._node_of, names))) > 1 for names in through_node)
        part._begin(named[index], self._num_rings * max(leaving, 1))
        return part

    def _node_of(self, name: int) -> int:
        return name // self._node_size

    def _around(self, op: str, unsharded: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Issue an operation; its handle ends when the operation would have ended over the links."""
        if unsharded is not None:
            require_cpu("ThrottledCommunicator", unsharded)
        clock = torch.tensor([time.monotonic_ns()])
        work = issue()
        if self.world_size == 1 or (unsharded is not None and unsharded.numel() == 0):
            return work
        with labelled(CONTROL):
            agreed = self.inner.all_reduce(clock, "max")  # [Note: When a transfer begins]
        num_bytes = 0 if unsharded is None else unsharded.nbytes
        delayed = _Delayed(self, work, agreed, clock, op, num_bytes)
        self._unresolved.append(delayed)
        return delayed

    def resolve(self, wanted: _Delayed) -> None:
        """Compute the end of ``wanted``, and of all operations issued before it."""
        with self._resolving:
            while wanted.done_s is None:
                first = self._unresolved[0]
                first.done_s = self._last_s = self._done_s(first)
                self._unresolved.popleft()

    def _done_s(self, delayed: _Delayed) -> float:
        start_s = max(delayed.start_s(), self._last_s)
        if not self.exchanged:  # no link leaves the node
            return start_s
        num_bytes = bytes_per_link(delayed.op, delayed.num_bytes, self.world_size)
        if delayed.op == "all_to_all":
            num_bytes = delayed.num_bytes * self.exchanged
        rate = self._link.bytes_per_s
        passed_s = self._bucket.reserve(start_s, num_bytes * self._num_rings / rate, self._link.burst_bytes / rate)
        return passed_s + num_hops(delayed.op, self.world_size) * self._link.latency_s


class _Delayed:
    """The handle of an operation of the inner communicator that ends no earlier than it would over the links."""

    def __init__(
        self, comm: ThrottledCommunicator, work: Work, agreed: Work, clock: Tensor, op: str, num_bytes: int
    ) -> None:
        self._comm, self._work, self._agreed, self._clock = comm, work, agreed, clock
        self.op, self.num_bytes = op, num_bytes
        self.done_s: float | None = None

    def start_s(self) -> float:
        """Return when the last rank issued the operation, by the host's monotonic clock."""
        self._agreed.wait()
        start_ns = int(self._clock)
        if start_ns > time.monotonic_ns():
            raise RuntimeError(
                "the ranks' clocks differ, so that a simulated link means nothing; use ranks of one host"
            )
        return start_ns / _NS

    def wait(self) -> None:
        """Return once the bytes have arrived and would have arrived over the links; at once when called again."""
        self._work.wait()
        if self.done_s is None:
            self._comm.resolve(self)
        assert self.done_s is not None
        sleep_until(self.done_s)


def sleep_until(deadline_s: float) -> None:
    """Return at ``deadline_s`` of `time.monotonic`, about 10 microseconds late if a core is free."""
    if not _precise.get():
        _wake_in_time()
    while (left_s := deadline_s - time.monotonic()) > 0:
        time.sleep(left_s - SPIN_S if left_s > SPIN_S else 0)


class _Precise(threading.local):
    """Whether `_wake_in_time` was called on this thread; the kernel has the setting for each thread."""

    done = False

    def get(self) -> bool:
        was, self.done = self.done, True
        return was


_precise = _Precise()


def _wake_in_time() -> None:
    """Set this thread's timer slack to 1 ns: by default the kernel may wake it 50 microseconds late to save power."""
    if sys.platform == "linux":
        pr_set_timerslack, one_ns = 29, 1
        ctypes.CDLL(None).prctl(pr_set_timerslack, one_ns, 0, 0, 0)
