"""Data types of a traced micro-batch: allocations and operations between two events that hooks report to the engine.

[Note: Alike blocks]
    Blocks of one kind do the same between the same events, except for the first and the last block, or two or
    three of each if a block's input leaves while later ones run. So a deep model is
    traced with few blocks, two neighbours in the middle are compared span by span, and one of them is repeated. If they
    differ, the model is traced at its full depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.lab.predict.work import Work

ROOT = -1
EventName = Literal[
    "start",
    "pre_forward",
    "post_forward",
    "recompute",
    "pre_backward",
    "grad",
    "post_backward",
    "backward_over",
    "exchange",
]


@dataclass(frozen=True)
class Event:
    """An event that a hook reports to the engine; or ``exchange``, which an engine does not hear of."""

    # which event. ``recompute``: forward is recomputed inside backward; ``grad``: a parameter's gradient is ready;
    # ``exchange``: the model waits for an all-to-all of `zeroshard.models.SequenceParallel`.
    name: EventName
    unit: int = ROOT  # the unit's place in the order of execution; `ROOT` for the root unit
    param: str = ""  # for ``grad``, the parameter's name within the unit
    grads_flow: bool = False  # for ``post_forward``, whether the backward of this call will be reported
    num_bytes: int = 0  # for ``exchange``, the bytes of its input
    num_ranks: int = 1  # for ``exchange``, the ranks that share a sequence
    keep_unsharded: bool = False  # for ``post_forward``, whether no hook will report when the weights are needed again


@dataclass(frozen=True)
class Span:
    """The interval from one event to the next: the change in live bytes, their peak, and the operations."""

    event: Event  # the event at which the span begins
    kept: int = 0  # change in bytes of storages that are live when backward begins (activations)
    temporary: int = 0  # change in bytes of all other storages
    # peak_kept, peak_temporary: the same two changes, from the start of the span to the peak of their sum
    peak_kept: int = 0
    peak_temporary: int = 0
    work: tuple[Work, ...] = ()  # the operations, in order


@dataclass(frozen=True)
class Trace:
    """A traced micro-batch."""

    units: tuple[str, ...]  # names of the units in order of execution
    spans: tuple[Span, ...]  # the spans in order
    input_bytes: int  # bytes of the arguments and the module buffers, which are live throughout
    tokens: int  # elements of the first argument if they are integers, else its rows

    @property
    def peak_bytes(self) -> int:
        """The most bytes of activations and temporary tensors at once; gradients are gone as soon as they are there."""
        live = most = 0
        for span in self.spans:
            most = max(most, live + span.peak_kept + span.peak_temporary)
            live += span.kept + span.temporary
        return most


def repeat_blocks(
    trace: Trace, num_blocks: int, period: int = 1, *, before: int = 0, after: int = 0, edge: int = 1
) -> Trace | None:
    """Extend the ``trace`` of few blocks to ``num_blocks``; None if the blocks in the middle are not alike.

    Args:
        trace: a trace of 2 ``period`` + 2 ``edge`` blocks or more.
        num_blocks: number of blocks of the result: those of ``trace`` plus a multiple of ``period``.
        period: distance between two blocks that are alike.
        before, after: numbers of units that run before and after the blocks, such as an embedding and a head.
        edge: number of blocks at either end that may be others than those in the middle.
    """
    few = len(trace.units)
    extra = num_blocks - (few - before - after)
    num_units = few + extra
    assert few - before - after >= 2 * (period + edge)
    assert extra >= 0
    assert extra % period == 0
    forward, backward, head = _by_unit(trace.spans)
    middle = range(before + edge, before + edge + period)
    for unit in middle:
        for spans in (forward, backward):
            if _moved(spans.get(unit, ()), period) != spans.get(unit + period, []):  # no gradient may reach blocks
                return None
    # The repeated blocks are inserted after the middle ones, so the units that came after these move up.
    again = (middle[i % period] for i in range(extra))
    old = [*range(before + edge), *middle, *again, *range(before + edge + period, few)]
    assert len(old) == num_units
    spans = list(head)
    for place, unit in enumerate(old):
        spans += _moved(forward[unit], place - unit)
    for place in reversed(range(num_units)):
        spans += _moved(backward.get(old[place], ()), place - old[place])
    prefix = trace.units[before].rpartition(".")[0]
    blocks = (f"{prefix}.{index}" if prefix else str(index) for index in range(num_blocks))
    names = (*trace.units[:before], *blocks, *trace.units[few - after :])
    # What the last span frees at once, such as the gradients of one graph, is that of few blocks in ``trace``.
    more = sum(span.temporary for span in spans) - sum(span.temporary for span in trace.spans)
    spans[-1] = replace(spans[-1], temporary=spans[-1].temporary - more)
    return replace(trace, units=names, spans=tuple(spans))


def _by_unit(spans: Sequence[Span]) -> tuple[dict[int, list[Span]], dict[int, list[Span]], list[Span]]:
    """The spans by unit: from its forward to the next unit's, the same in backward, and those before the first unit."""
    forward: dict[int, list[Span]] = {}
    backward: dict[int, list[Span]] = {}
    head: list[Span] = []
    current = head
    for span in spans:
        event = span.event
        if event.unit != ROOT and event.name == "pre_forward":
            current = forward.setdefault(event.unit, [])
        elif event.unit != ROOT and event.name == "pre_backward":
            current = backward.setdefault(event.unit, [])
        current.append(span)
    return forward, backward, head


def _moved(spans: Sequence[Span], places: int) -> list[Span]:
    return [
        span if span.event.unit == ROOT else replace(span, event=replace(span.event, unit=span.event.unit + places))
        for span in spans
    ]
