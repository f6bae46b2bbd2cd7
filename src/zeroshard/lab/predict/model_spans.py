"""A traced micro-batch as data: what is allocated and computed between two events of the engine.

[Note: Alike blocks]
    Blocks of one kind do the same between the same events, whatever their place, but for the first and the last. So a
    deep model is traced with few blocks, two neighbours in the middle are compared span by span, and one is repeated.
    Where they differ, the whole depth is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.lab.predict.work import Work

ROOT = -1
EventName = Literal[
    "start",
    "forward_begins",
    "forward_ends",
    "runs_again",
    "backward_begins",
    "grad",
    "backward_ends",
    "backward_over",
]


@dataclass(frozen=True)
class Event:
    """What the engine hears.

    Attributes:
        name: ``runs_again``: a forward inside backward; ``grad``: a parameter's gradient is there.
        unit: its place in the order of execution; `ROOT` for the root unit.
        param: of ``grad``: the parameter's name within the unit.
        grads_flow: of ``forward_ends``: whether a backward of this call will be told.
        keep: of ``forward_ends``: nobody will tell when its weights are needed again.
    """

    name: EventName
    unit: int = ROOT
    param: str = ""
    grads_flow: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Span:
    """From one event to the next: changes of live bytes, their highest point on the way, and the work.

    Attributes:
        event: with which it begins.
        kept, temporary: change of bytes, of what is alive when backward begins (activations) and of all else.
        peak_kept, peak_temporary: the same at the highest point of their sum, relative to the start of the span.
        work: what is computed, in order.
    """

    event: Event
    kept: int = 0
    temporary: int = 0
    peak_kept: int = 0
    peak_temporary: int = 0
    work: tuple[Work, ...] = ()


@dataclass(frozen=True)
class Trace:
    """A micro-batch.

    Attributes:
        units: names in order of execution.
        spans: in order.
        input_bytes: of the arguments and the model's buffers, which are there all along.
        tokens: elements of the first argument where those are integers, else its rows.
    """

    units: tuple[str, ...]
    spans: tuple[Span, ...]
    input_bytes: int
    tokens: int

    @property
    def activation_bytes(self) -> int:
        """What forward leaves for backward."""
        total = 0
        for span in self.spans:
            if span.event.name == "backward_begins":
                break
            total += span.kept
        return total


def repeat_blocks(trace: Trace, num_blocks: int, period: int = 1, *, before: int = 0, after: int = 0) -> Trace | None:
    """``trace`` of few blocks as one of ``num_blocks``; None where those in the middle are not alike.

    Args:
        trace: of 2 ``period`` + 2 blocks or more.
        num_blocks: a multiple of ``period`` more.
        period: after how many blocks they are alike again.
        before, after: units that run before the blocks and after them, an embedding and a head.
    """
    few = len(trace.units)
    extra = num_blocks - (few - before - after)
    num_units = few + extra
    assert few - before - after >= 2 * period + 2
    assert extra >= 0
    assert extra % period == 0
    forward, backward, head = _by_unit(trace.spans)
    middle = range(before + 1, before + 1 + period)
    for unit in middle:
        for spans in (forward, backward):
            if _moved(spans.get(unit, ()), period) != spans.get(unit + period, []):  # no gradient may reach blocks
                return None
    # The last of the repeated ones stands before what came after it, so the old later units move up.
    again = (middle[i % period] for i in range(extra))
    old = [*range(before + 1), *middle, *again, *range(before + 1 + period, few)]
    assert len(old) == num_units
    spans = list(head)
    for place, unit in enumerate(old):
        spans += _moved(forward[unit], place - unit)
    for place in reversed(range(num_units)):
        spans += _moved(backward.get(old[place], ()), place - old[place])
    prefix = trace.units[before].rpartition(".")[0]
    blocks = (f"{prefix}.{index}" if prefix else str(index) for index in range(num_blocks))
    names = (*trace.units[:before], *blocks, *trace.units[few - after :])
    return replace(trace, units=names, spans=tuple(spans))


def _by_unit(spans: Sequence[Span]) -> tuple[dict[int, list[Span]], dict[int, list[Span]], list[Span]]:
    """Spans from the forward of each unit to that of the next, the same backward, and what is before the first."""
    forward: dict[int, list[Span]] = {}
    backward: dict[int, list[Span]] = {}
    head: list[Span] = []
    current = head
    for span in spans:
        event = span.event
        if event.unit != ROOT and event.name == "forward_begins":
            current = forward.setdefault(event.unit, [])
        elif event.unit != ROOT and event.name == "backward_begins":
            current = backward.setdefault(event.unit, [])
        current.append(span)
    return forward, backward, head


def _moved(spans: Sequence[Span], places: int) -> list[Span]:
    return [
        span if span.event.unit == ROOT else replace(span, event=replace(span.event, unit=span.event.unit + places))
        for span in spans
    ]
