"""Reads the spans of each rank from the trace that ``--profile.trace-steps`` writes into a run folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from zeroshard.regular_files import json_of, read_text

TRACE = Path("trace") / "trace.json"
MOST_BYTES = 256 * 2**20  # larger traces are not read
Kind = Literal["forward", "backward", "other", "communication"]
_OTHERS = ("update", "clip", "data")  # names of spans that are neither forward nor backward of a unit


@dataclass(frozen=True)
class RankSpan:
    """A span of work on ``rank`` from ``start_s`` to ``end_s``, in seconds since the first span of the trace."""

    rank: int
    kind: Kind
    name: str
    start_s: float
    end_s: float


class TraceError(ValueError):
    """A trace cannot be shown; the message says why."""


def read_spans(path: Path) -> list[RankSpan]:
    """The spans of all ranks, sorted by rank and start.

    Raises:
        TraceError: the trace is missing, damaged, too large to be read for a figure, or has no spans of units.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise TraceError(f"{path.name} has more than {MOST_BYTES >> 20} MiB: open it in ui.perfetto.dev")
        events = json_of(read_text(path, MOST_BYTES))["traceEvents"]
        spans = [span for event in events if (span := _span(event)) is not None]
    except OSError as error:
        raise TraceError(f"{path.name} cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, TraceError):
            raise
        raise TraceError(f"{path.name} is damaged ({type(error).__name__})") from None
    if not spans:
        raise TraceError(f"{path.name} has no spans of units")
    first = min(span.start_s for span in spans)
    moved = [RankSpan(s.rank, s.kind, s.name, s.start_s - first, s.end_s - first) for s in spans]
    return sorted(moved, key=lambda span: (span.rank, span.start_s))


def _span(event: Mapping[str, Any]) -> RankSpan | None:
    if event.get("ph") != "X":
        return None
    kind = _kind(event)
    if kind is None:
        return None
    start_s = float(event["ts"]) * 1e-6
    return RankSpan(int(event["pid"]), kind, str(event["name"]), start_s, start_s + float(event["dur"]) * 1e-6)


def _kind(event: Mapping[str, Any]) -> Kind | None:
    if event.get("cat") == "communication":
        return "communication"
    if event.get("cat") != "user_annotation":
        return None
    first = str(event.get("name")).partition(" ")[0]
    if first == "forward":
        return "forward"
    if first == "backward":
        return "backward"
    return "other" if first in _OTHERS or str(event.get("name")).startswith("Optimizer.step") else None
