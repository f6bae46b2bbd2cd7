"""What a link really does, measured with the messages that training sends: collectives of the communicator itself.

A transfer of n bytes over each link takes ``overhead + n / B``. Two sizes give B, and whatever a transfer costs once
(latency, a shaper's burst, our own code) drops out of it. Each is made after a pause that fills a shaper's bucket.
An all-reduce of one byte a rank makes twice the hops of an all-gather: what it takes longer is the latency of these,
and what an operation costs once drops out of that too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroshard.comm.base import Communicator, Work, split
from zeroshard.comm.wrappers.throttle import Link

TOLERANCE = 0.05
LONG_S, SHORT_S = 0.4, 0.1  # how long the two transfers should take
MAX_BYTES = 96 << 20  # of one transfer over a link
MIN_BYTES = 64 << 10
PAUSE_S = 0.02
REPEATS = 3
NUM_SMALL, SMALL_S = 20, 0.2  # small operations one after another: so many, or as many as take so long


@dataclass(frozen=True)
class Probed:
    """What a link achieved.

    Attributes:
        bytes_per_s: in each direction, while all links of the ring are busy.
        latency_s: of a message, for one hop.
        seconds: that the probe took.
    """

    bytes_per_s: float
    latency_s: float
    seconds: float


def probe(comm: Communicator, asked: Link, node_size: int = 1) -> Probed | None:
    """Measure the links between the nodes of ``comm``, whose first ranks talk alone meanwhile. Collective.

    Args:
        comm: at least two ranks, on the CPU.
        asked: what the link should do; says how much to send.
        node_size: neighbouring ranks that are a node.

    Returns:
        On the first rank of each node what it saw, None on the others.
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
    most = long // (part.world_size - 1)  # from each rank
    whole = torch.zeros(part.world_size * most, dtype=torch.uint8)

    def gather(numel: int) -> Callable[[], Work]:
        """Of ``numel`` bytes from each rank, in place as the engine's: nothing is copied beside it."""
        own = whole[part.rank * numel : (part.rank + 1) * numel]
        return lambda: part.all_gather(whole[: part.world_size * numel], own)

    def median_s(numel: int) -> float:
        return statistics.median(_seconds(part, gather(numel)) for _ in range(REPEATS))

    num_hops = part.world_size - 1  # of a gather; an all-reduce has as many more
    few, many = short // num_hops, most
    _seconds(part, gather(few))  # connections open, memory is there
    sent = (many - few) * num_hops  # more over a link in the long transfer than in the short one
    bytes_per_s = sent / max(median_s(many) - median_s(few), 1e-9)
    times = max(min(NUM_SMALL, int(SMALL_S / max(num_hops * asked.latency_s, 1e-9))), 2)
    ones = torch.zeros(part.world_size, dtype=torch.uint8)
    differences = [
        _seconds(part, lambda: part.all_reduce(ones), times) - _seconds(part, gather(1), times) for _ in range(REPEATS)
    ]
    if node_size > 1:
        comm.barrier()
    latency_s = max(statistics.median(differences), 0.0) / num_hops
    return Probed(bytes_per_s, latency_s, time.perf_counter() - began)


def _seconds(comm: Communicator, issue: Callable[[], Work], times: int = 1) -> float:
    """Of an operation, after a pause; of ``times`` one after another, the mean."""
    comm.barrier()
    time.sleep(PAUSE_S)
    comm.barrier()
    start = time.perf_counter()
    for _ in range(times):
        issue().wait()
    return (time.perf_counter() - start) / times


def why_not_comparable(asked: Link, achieved: Probed) -> str:
    """How the link differs from what was asked by more than `TOLERANCE`; empty where it does not.

    A latency or a bandwidth that was not asked for is not compared.
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
