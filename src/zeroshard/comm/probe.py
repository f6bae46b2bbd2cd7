"""Measures the bandwidth and latency of the links between nodes, with collectives as training issues them.

Sending n bytes over each link takes ``overhead + n / B``. The difference between two sizes gives B: whatever a transfer
costs only once (latency, a traffic shaper's burst, our own code) cancels out. Before each transfer there is a pause in
which a shaper's token bucket fills up. In a ring, an all-reduce takes twice as many hops as an all-gather. So the
difference of the times that both take for a few bytes is the latency of the additional hops; fixed costs cancel out
here too. A `RingCommunicator` sends the smallest messages in fewer rounds, the same number for both, so over links that
the kernel slows down the messages are just too large for that (``ring_messages``), and one follows a pause, so that
the bucket lets it pass at once.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroshard.comm.base import Communicator, Work, split
from zeroshard.comm.ring import small
from zeroshard.comm.wrappers.throttle import Link

TOLERANCE = 0.05
LONG_S, SHORT_S = 0.4, 0.1  # how long the two transfers should take
MAX_BYTES = 96 << 20  # the most that one transfer sends over a link
MIN_BYTES = 64 << 10
PAUSE_S = 0.02
REPEATS = 3
REPEATS_ALONE = 9  # of operations that are not issued one after another
NUM_SMALL, SMALL_S = 20, 0.2  # small operations issued one after another: this many, or fewer if they take this long


@dataclass(frozen=True)
class Probed:
    """The bandwidth and latency that the links achieved."""

    bytes_per_s: float  # bandwidth of a link in each direction, while all links of the ring are busy
    latency_s: float  # latency of a message over one hop
    seconds: float  # how long the probe took


def probe(comm: Communicator, asked: Link, node_size: int = 1, *, ring_messages: bool = False) -> Probed | None:
    """Measure the links between the nodes of ``comm``: only the first rank of each node communicates. Collective.

    Args:
        comm: a communicator of at least two ranks that moves CPU tensors.
        asked: the bandwidth and latency that the link should have; they determine how many bytes are sent.
        node_size: how many neighbouring ranks form a node.
        ring_messages: measure the latency with messages that a `RingCommunicator` sends round the ring; else with
            messages of a byte.

    Returns:
        The measurement on the first rank of each node, None on all other ranks.
    """
    began = time.perf_counter()
    leaders = list(range(0, comm.world_size, node_size))
    if node_size > 1:
        others = [[rank] for rank in range(comm.world_size) if rank not in leaders]
        part = split(comm, [leaders, *others])
        if comm.rank not in leaders:
            comm.barrier()
            return None
    else:
        part = comm
    expected = min(asked.bytes_per_s, MAX_BYTES / LONG_S)
    long, short = (min(max(int(expected * s), MIN_BYTES), MAX_BYTES) for s in (LONG_S, SHORT_S))
    most = long // (part.world_size - 1)  # bytes that each rank contributes to the long transfer
    unsharded = torch.zeros(part.world_size * most, dtype=torch.uint8)

    def gather(numel: int) -> Callable[[], Work]:
        """Return a function that all-gathers ``numel`` bytes of each rank, in place as the engine does: no copies."""
        own = unsharded[part.rank * numel : (part.rank + 1) * numel]
        return lambda: part.all_gather(unsharded[: part.world_size * numel], own)

    def median_s(numel: int) -> float:
        return statistics.median(_seconds(part, gather(numel)) for _ in range(REPEATS))

    num_hops = part.world_size - 1  # of an all-gather; an all-reduce has twice as many
    few, many = short // num_hops, most
    _seconds(part, gather(few))  # warm-up: opens the connections and touches the memory
    sent = (many - few) * num_hops  # bytes by which the long transfer exceeds the short one, over each link
    bytes_per_s = sent / max(median_s(many) - median_s(few), 1e-9)
    if ring_messages:
        message, times, repeats = small.MOST_BYTES // part.world_size + 1, 1, REPEATS_ALONE
    else:
        times = max(min(NUM_SMALL, int(SMALL_S / max(num_hops * asked.latency_s, 1e-9))), 2)
        message, repeats = 1, REPEATS
    every = torch.zeros(part.world_size * message, dtype=torch.uint8)
    differences = [
        _seconds(part, lambda: part.all_reduce(every), times) - _seconds(part, gather(message), times)
        for _ in range(repeats)
    ]
    if node_size > 1:
        comm.barrier()
    latency_s = max(statistics.median(differences), 0.0) / num_hops
    return Probed(bytes_per_s, latency_s, time.perf_counter() - began)


def _seconds(comm: Communicator, issue: Callable[[], Work], times: int = 1) -> float:
    """Return the seconds that an operation takes after a pause: the mean of ``times``, issued one after another."""
    comm.barrier()
    time.sleep(PAUSE_S)
    comm.barrier()
    start = time.perf_counter()
    for _ in range(times):
        issue().wait()
    return (time.perf_counter() - start) / times


def why_not_comparable(asked: Link, achieved: Probed) -> str:
    """Return how the link differs from ``asked``, in words; empty if no number is off by more than `TOLERANCE`.

    A bandwidth or latency that was not asked for (infinite, or 0) is not compared.
    """
    reasons = []
    if asked.bytes_per_s < float("inf"):
        off = achieved.bytes_per_s / asked.bytes_per_s - 1
        if abs(off) > TOLERANCE:
            rates = f"{asked.bytes_per_s * 8e-6:,.6g} Mbit/s, achieved {achieved.bytes_per_s * 8e-6:,.6g} Mbit/s"
            reasons.append(f"bandwidth: asked {rates} ({off:+.1%})")
    if asked.latency_s > 0:
        off_s = achieved.latency_s - asked.latency_s
        if abs(off_s) > TOLERANCE * asked.latency_s:
            times = f"{asked.latency_s * 1e6:.6g} us, achieved {achieved.latency_s * 1e6:.4g} us"
            reasons.append(f"latency: asked {times} ({off_s / asked.latency_s:+.1%})")
    return "; ".join(reasons)
