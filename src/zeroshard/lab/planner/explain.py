"""A step told action by action: what is computed, what is sent and why, with formula and source."""

from __future__ import annotations

from zeroshard.lab.planner.advice import describe
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds, size
from zeroshard.lab.predict.actions import Compute, Issue, Step
from zeroshard.lab.predict.timeline import TimedSpan, simulate

ZERO = "Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054"
WHY = {
    ("all_reduce", "grads"): ("the mean gradient on every rank", "2 (W-1)/W P g", f"{ZERO}, section 7.1"),
    ("reduce_scatter", "grads"): ("each rank its shard of the mean gradient", "(W-1)/W P g", f"{ZERO}, section 7.2.1"),
    ("all_gather", "grads"): ("the second half of an all-reduce", "(W-1)/W P g", f"{ZERO}, section 7.1"),
    ("all_gather", "weights"): ("whole weights from the ranks' shards", "(W-1)/W P c", f"{ZERO}, section 7.2.2"),
}
ACROSS = (
    "the shard's sum over replicas",
    "2 (R-1)/R S g",
    "Zhang et al. 2022, MiCS, arXiv:2205.00119, section 3",
)
LEGEND = (
    "P: elements of a unit's padded buffer, S = P / W of a shard; W ranks shard, R hold the same shard; "
    "c, g: bytes of an element of weights that compute, of gradients on their way."
)


def explain(planner: Planner, row: Row) -> str:
    """The last micro-batch of ``row`` and its update, in order; units in the middle are left out."""
    timing = simulate(row.step, planner.device, planner.cluster, with_spans=True)
    lines = [
        f"One step of {describe(row, planner.cluster.world_size)}: {seconds(timing.step_s)}, of it "
        f"{seconds(timing.compute_s)} computing and {seconds(timing.exposed_s)} waiting; collectives run for "
        f"{seconds(timing.comm_s)}.",
        LEGEND,
        "",
    ]
    if row.num_micro > 1:
        lines.append(f"Of {row.num_micro} micro-batches the last one is shown.")
    lines += [*_sequence(row.step, timing.spans), "", *_sources(row.step), "", *_memory(row)]
    return "\n".join(lines)


def _sequence(step: Step, spans: list[TimedSpan]) -> list[str]:
    actions = [*step.last, *step.update]
    issued = [a for a in actions if isinstance(a, Issue)]
    computed = sum(isinstance(a, Compute) for a in actions)
    comm = [span for span in spans if span.kind == "comm"][-len(issued) :] if issued else []
    rest = [span for span in spans if span.kind == "compute"][-computed:]
    rows: list[tuple[float, str, str, str, str, str]] = []
    merged: list[TimedSpan] = []
    for span in rest:
        previous = merged[-1] if merged else None
        if previous and (previous.unit, previous.phase) == (span.unit, span.phase):
            merged[-1] = TimedSpan("compute", span.unit, span.phase, "", previous.start_s, span.end_s)
        else:
            merged.append(span)
    first = min((span.start_s for span in (*comm, *merged)), default=0.0)
    for span in merged:
        took = seconds(span.end_s - span.start_s)
        rows.append((span.start_s, f"{span.phase} {span.unit}", "compute", "", took, ""))
    for action, span in zip(issued, comm, strict=True):
        message = action.message
        if action.control:
            what, formula = "what all ranks must know", f"{message.num_bytes} bytes"
        else:
            what, formula, _ = ACROSS if action.replicas else WHY[(message.op, message.phase)]
        took = seconds(span.end_s - span.start_s)
        where = f"{message.buffer}/{message.phase}" if not action.control else "control"
        rows.append((span.start_s, where, message.op, size(message.num_bytes), took, f"{what}: {formula}"))
    rows.sort(key=lambda each: each[0])
    alike = _alike(step)
    shown: list[tuple[float, str, str, str, str, str]] = []
    for row in rows:
        unit = row[1].split("/")[0].rpartition(" ")[2]
        if unit not in alike:
            shown.append(row)
        elif shown[-1][1] != "...":
            shown.append((row[0], "...", f"{len(alike)} more units alike", "", "", ""))
    rows = shown
    lines = [
        f"{seconds(start - first):>9}  {a:<28} {b:<15} {c:>10} {d:>8}  {e}".rstrip() for start, a, b, c, d, e in rows
    ]
    return [f"{'at':>9}  {'unit':<28} {'what':<15} {'bytes':>10} {'takes':>8}", *lines]


def _alike(step: Step) -> set[str]:
    """Units in the middle, which do what their neighbours do."""
    order = list(dict.fromkeys(a.unit for a in step.last if isinstance(a, Compute) and a.phase == "forward"))
    units = [unit for unit in order if unit != "root"]
    return set(units[2:-2]) if len(units) > 6 else set()


def _sources(step: Step) -> list[str]:
    found: dict[str, str] = {}
    for action in (*step.last, *step.update):
        if isinstance(action, Issue) and not action.control:
            _, formula, source = ACROSS if action.replicas else WHY[(action.message.op, action.message.phase)]
            found[f"{action.message.op} of {action.message.phase}"] = f"{formula} bytes sent by each rank; {source}"
    return [f"{what}: {why}" for what, why in found.items()] or ["One rank sends nothing."]


def _memory(row: Row) -> list[str]:
    peak = row.step.peak
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in peak.by_category.items() if num_bytes)
    text = f"Fullest in the {peak.where}: {size(peak.total)}: {parts}"
    if row.comm_bytes:
        text += f"; and about {size(row.comm_bytes)} of NCCL's own"
    return [text + "."]
