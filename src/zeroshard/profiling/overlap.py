"""How much of the communication overlaps with computation; only the rest, the exposed part, costs time.

A rank's operations begin in the order in which they were issued, and several may be in flight at the same time. To each
we attribute the time until its end, from its own issue or from the end of the previous operation, whichever is later:

    issued      1  2        3
    under way   |---- 1 ----|-- 2 --|      |- 3 -|
                            ^ 1 ended

So the times of all operations add up to the time in which any was in flight: the *total*. The part of it for which
computation waited is *exposed* (`zeroshard.comm.wrappers.exposed` measures it, label by label); the rest is *hidden*.
If a rank is late to a collective, the others wait for it, and on them this counts as communication.

A label is ``UNIT/WHAT/PHASE``. ``blocks.3/weights/backward`` is block 3's weights; for the total, the operation was
issued in backward, and for the exposed part, it was waited for in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedOperation:
    """One operation: its label, when it was issued, and when it had ended; seconds on one clock."""

    label: str
    issued_s: float
    ended_s: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication."""

    total_s: float  # seconds in which an operation was in flight
    exposed_s: float  # seconds for which computation waited for operations (exposed communication)

    @property
    def hidden_s(self) -> float:
        """Total minus exposed; clamped at 0, because the two are measured independently."""
        return max(self.total_s - self.exposed_s, 0.0)


def under_way(operations: Iterable[TimedOperation]) -> dict[str, float]:
    """Return seconds by label, which add up to the time in which any operation was in flight.

    ``operations`` must be in the order of issue.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    last_end = float("-inf")
    for operation in operations:
        start = max(operation.issued_s, last_end)
        seconds[operation.label] += max(operation.ended_s - start, 0.0)
        last_end = max(last_end, operation.ended_s)
    return dict(seconds)


def overlap(total_s: Mapping[str, float], exposed_s: Mapping[str, float]) -> dict[str, Overlap]:
    """Combine total and exposed seconds by label; sorted by exposed time, longest first."""
    labels = sorted({*total_s, *exposed_s}, key=lambda label: (-exposed_s.get(label, 0.0), label))
    return {label: Overlap(total_s.get(label, 0.0), exposed_s.get(label, 0.0)) for label in labels}
