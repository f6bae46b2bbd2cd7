"""How much of communication computation hides: the rest is all that it costs.

Operations of a rank begin in the order in which they were issued, and several may be under way. Each is given the time
from its own issue, or from the end of the one before it where that is later, to its end:

    issued      1  2        3
    under way   |---- 1 ----|-- 2 --|      |- 3 -|
                            ^ 1 ended

So the shares of all operations add up to the time in which any was under way: the *total*. What of it computation stood
still for is *exposed* (`zeroshard.comm.wrappers.exposed` measures it, label by label); the rest was *hidden*. A rank
that comes late to a collective has the others wait: that counts as communication, on them.

A label is ``UNIT/WHAT/PHASE``: ``blocks.3/weights/backward`` is what was issued, or waited for, in backward.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TimedOperation:
    """One operation: what it was for, when it was issued, and when it had ended; seconds on one clock."""

    label: str
    issued_s: float
    ended_s: float


@dataclass(frozen=True)
class Overlap:
    """Seconds of communication.

    Attributes:
        total_s: in which an operation was under way.
        exposed_s: for which computation stood still.
    """

    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """Total less exposed; never below 0, though the two are measured apart."""
        return max(self.total_s - self.exposed_s, 0.0)

    def __add__(self, other: Overlap) -> Overlap:
        return Overlap(self.total_s + other.total_s, self.exposed_s + other.exposed_s)


def under_way(operations: Iterable[TimedOperation]) -> dict[str, float]:
    """Seconds by label; together the time in which any operation was under way. ``operations`` in order of issue."""
    seconds: defaultdict[str, float] = defaultdict(float)
    last_end = float("-inf")
    for operation in operations:
        start = max(operation.issued_s, last_end)
        seconds[operation.label] += max(operation.ended_s - start, 0.0)
        last_end = max(last_end, operation.ended_s)
    return dict(seconds)


def overlap(total_s: Mapping[str, float], exposed_s: Mapping[str, float]) -> dict[str, Overlap]:
    """Both by label; the one with the most exposed time first."""
    labels = sorted({*total_s, *exposed_s}, key=lambda label: (-exposed_s.get(label, 0.0), label))
    return {label: Overlap(total_s.get(label, 0.0), exposed_s.get(label, 0.0)) for label in labels}


def table(found: Mapping[str, Overlap]) -> str:
    """Plain text: milliseconds by label, and their sum."""
    total = sum(found.values(), Overlap(0.0, 0.0))
    rows = [*found.items(), ("all", total)]
    width = max(len(label) for label, _ in rows)
    lines = [f"{'':{width}}  {'total ms':>9}  {'hidden ms':>9}  {'exposed ms':>10}"]
    for label, value in rows:
        times = f"{value.total_s * 1e3:9.3f}  {value.hidden_s * 1e3:9.3f}  {value.exposed_s * 1e3:10.3f}"
        lines.append(f"{label:{width}}  {times}")
    return "\n".join(lines)
