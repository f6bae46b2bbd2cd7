"""Explains a step action by action: computation and collectives in order, each with its purpose, formula and source."""

from __future__ import annotations

import re
from dataclasses import dataclass

from zeroshard.columns import columns
from zeroshard.lab.planner.advice import describe
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds, size
from zeroshard.lab.planner.sources import BESIDE, RATES, beside_engine, memory, ranges, rates
from zeroshard.lab.predict.actions import Compute, Issue, Step
from zeroshard.lab.predict.timeline import TimedSpan, simulate

ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
ZEROPP = "Wang et al. 2023, ZeRO++, arXiv:2306.10209"
WHY = {
    ("all_reduce", "grads"): ("the mean gradient on every rank", "2 (W-1)/W P g", f"{ZERO}, section 7.1"),
    ("reduce_scatter", "grads"): ("each rank its shard of the mean gradient", "(W-1)/W P g", f"{ZERO}, section 7.2.1"),
    ("all_gather", "grads"): ("the second half of an all-reduce", "(W-1)/W P g", f"{ZERO}, section 7.1"),
    ("all_to_all", "grads"): ("quantised shards, each to its owner", "(W-1)/W P q", f"{ZEROPP}, section 3.3"),
    ("broadcast", "weights"): ("whole tensors from who owns them", "B", "zeroshard.zero.buffers.shards"),
    ("all_gather", "weights"): ("unsharded weights from the ranks' shards", "(W-1)/W P c", f"{ZERO}, section 7.2.2"),
}
ACROSS = (
    "the shard's sum over replicas",
    "2 (R-1)/R S g",
    "Zhang et al. 2022, MiCS, arXiv:2205.00119, section 3",
)
BETWEEN = ("quantised sums of nodes, each to its owner", "(M-1)/M S N q", f"{ZEROPP}, section 3.3")
INSIDE = ("each rank its part of the sum over its node", "(N-1)/N P g", "zeroshard.zero.buffers.node_reduce")
NEAR = ("unsharded weights from the second copy in the node", "(C-1)/C P c, packed P q", f"{ZEROPP}, section 3.2")
ALIKE = 0.1  # units whose times differ by a smaller share are shown in one line
LEGEND = (
    "P: elements of a unit's padded buffer, S = P / W of a shard; W ranks shard, R hold the same shard, "
    "C of a node a second copy, M nodes of N ranks; "
    "c, g, q: bytes of an element of weights that compute, of gradients on their way, of a wire format with its scales."
)


def explain(planner: Planner, row: Row) -> str:
    """Describe the last micro-batch of ``row`` and its update, in order; units that do the same share a line."""
    timing = simulate(row.step, planner.device, planner.cluster, software=planner.software, with_spans=True)
    took = row.timing
    lines = [
        f"One step of {describe(row, planner.cluster.world_size)}: {seconds(took.step_s)}, of it "
        f"{seconds(took.compute_s)} computing and {seconds(took.exposed_s)} waiting; collectives run for "
        f"{seconds(took.comm_s)}.",
        LEGEND,
        "",
    ]
    if row.num_micro > 1:
        lines.append(f"Of {row.num_micro} micro-batches the last one is shown.")
    lines += [*_sequence(row, timing.spans), "", *traffic(row), ""]
    if row.timing.wire_s:
        lines += [
            f"Of the step quantising takes {seconds(row.timing.wire_s)}, on the cores or the GPU that compute.",
            "",
        ]
    lines += [*columns([RATES, *rates(planner)]), *ranges(row), ""]
    lines += [*memory(row), *(columns([BESIDE, *beside_engine(row)], right=(1,)) if beside_engine(row) else [])]
    return "\n".join(lines)


@dataclass
class _Event:
    """One line: a computation or collective of one unit, or of several units that do the same."""

    start_s: float
    took_s: float
    key: tuple[str, ...]  # equal for events that may share a line: phase, operation, bytes, and the units' common name
    units: list[str]
    label: str  # with a placeholder for the units' names
    what: str
    bytes: str
    why: str

    def takes_in(self, other: _Event) -> bool:
        """Merge ``other`` into this line if it is the same event of another unit; returns whether it is."""
        if self.key != other.key or abs(other.took_s / len(other.units) - self._each_s) > ALIKE * self._each_s:
            return False
        self.took_s += other.took_s
        self.units += other.units
        return True

    @property
    def _each_s(self) -> float:
        return self.took_s / len(self.units)

    def cells(self, first_s: float) -> tuple[str, ...]:
        count = len(self.units)
        names = self.units[0] if count == 1 else f"{self.units[0]} ... {self.units[-1]}"
        times = "" if count == 1 else f"{count} x "
        size_told = self.bytes and times + self.bytes
        label = self.label.format(names)
        return seconds(self.start_s - first_s), label, self.what, size_told, times + seconds(self._each_s), self.why


def _sequence(row: Row, spans: list[TimedSpan]) -> list[str]:
    """A line for each event, in order; units that do the same one after another share a line."""
    events = sorted([*_computing(row.step, spans), *_sending(row, spans)], key=lambda event: event.start_s)
    first_s = min((event.start_s for event in events), default=0.0)
    merged: list[_Event] = []
    latest: dict[tuple[str, ...], _Event] = {}
    for event in events:
        last = latest.get(event.key)
        if last is None or not last.takes_in(event):
            merged.append(event)
            latest[event.key] = event
    titles = ("at", "unit", "what", "bytes", "takes", "")
    return columns([titles, *(event.cells(first_s) for event in merged)], right=(0, 3, 4))


def _computing(step: Step, spans: list[TimedSpan]) -> list[_Event]:
    """An event for each unit's computation in a phase, however many pieces it has."""
    num_computed = sum(isinstance(action, Compute) for action in (*step.last, *step.update))
    found: dict[tuple[str, str, bool], _Event] = {}
    for span in [span for span in spans if span.kind == "compute"][-num_computed:] if num_computed else []:
        # The root computes before the blocks (embeddings) and after them (the head).
        at_end = span.unit == "root" and any(key[0] == span.phase and key[1] != "root" for key in found)
        event = found.get((span.phase, span.unit, at_end))
        if event is not None:
            event.took_s += span.end_s - span.start_s
            continue
        key = ("compute", span.phase, _common_name(span.unit), str(at_end))
        label = f"{span.phase} {{}}"
        took = span.end_s - span.start_s
        found[span.phase, span.unit, at_end] = _Event(span.start_s, took, key, [span.unit], label, "compute", "", "")
    return list(found.values())


def _sending(row: Row, spans: list[TimedSpan]) -> list[_Event]:
    """An event for every collective among more than one rank."""
    issued = [action for action in (*row.step.last, *row.step.update) if isinstance(action, Issue)]
    comm = [span for span in spans if span.kind == "comm"][-len(issued) :] if issued else []
    backward_s = min((s.start_s for s in spans if s.kind == "compute" and s.phase == "backward"), default=0.0)
    found = []
    for action, span in zip(issued, comm, strict=True):
        message, took = action.message, span.end_s - span.start_s
        if message.world_size == 1:
            continue  # nothing is sent
        if action.control:
            what, formula, unit, label = "what all ranks must know", f"{message.num_bytes} bytes", "control", "{}"
        else:
            what, formula, _ = _why(action, row)
            unit, label = message.buffer, f"{{}}/{message.phase}"
        turn = "control" if action.control else "forward" if span.start_s < backward_s else "backward"
        key = (turn, message.op, message.phase, str(message.num_bytes), what, _common_name(unit))
        told = f"{what}: {formula}"
        found.append(_Event(span.start_s, took, key, [unit], label, message.op, size(message.num_bytes), told))
    return found


def _common_name(unit: str) -> str:
    """``blocks.#`` for ``blocks.7``: only units of one list may share a line."""
    return re.sub(r"\d+", "#", unit)


def _why(action: Issue, row: Row) -> tuple[str, str, str]:
    """A collective's purpose, the formula of the bytes that each rank sends, and the paper."""
    message = action.message
    if action.replicas:
        return BETWEEN if message.op == "all_to_all" and row.node_size else ACROSS
    if message.op == "reduce_scatter" and row.node_size and message.world_size == row.node_size:
        return INSIDE
    if message.phase == "weights" and message.world_size == row.node_copy:
        return NEAR
    return WHY[(message.op, message.phase)]


def traffic(row: Row) -> list[str]:
    """Lines on the bytes that a rank sends in each kind of collective, with the paper, and on the traffic of each link.

    The bytes of a link are those of unsharded buffers, as communicators count them.
    """
    found: dict[tuple[str, str, str], str] = {}
    for action in (*row.step.last, *row.step.update):
        if isinstance(action, Issue) and not action.control and action.message.world_size > 1:
            why = _why(action, row)
            found.setdefault(why, f"{action.message.op} of {action.message.phase}, {why[0]}")
    told = [f"{what}: {formula} bytes sent by each rank; {source}" for (_, formula, source), what in found.items()]
    told += [
        f"{each.op} among {each.num_ranks:,} ranks, {each.link}: {each.count:,} in a step, buffers of "
        f"{size(each.num_bytes)}"
        for each in row.by_link
        if each.num_ranks > 1
    ]
    return told or ["One rank sends nothing."]
