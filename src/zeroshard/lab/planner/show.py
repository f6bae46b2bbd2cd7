"""Formats a plan as text: a heading, a table of rows, and the advice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import add

from zeroshard.host.columns import columns, fitted
from zeroshard.lab.planner.advice import GIB
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.predict.workload import Workload
from zeroshard.zero import MixedPrecision

COLUMNS = (
    "stage",
    "shards",
    "micro-batch",
    "fits",
    "memory",
    "headroom",
    "step",
    "tokens/s",
    "MFU",
    "exposed",
    "bottleneck",
)


TIMES = ("step", "tokens/s", "MFU", "exposed", "bottleneck")
SPARE = ("headroom", "exposed", "MFU")  # columns that a narrow terminal omits, in this order


def text(plan: Plan, width: int = 0) -> str:
    """The complete plan as text; ``width``: the terminal's columns, 0: there is none."""
    return "\n".join([heading(plan), "", table(plan, width), "", plan.advice, *notes(plan)])


def text_without_times(plan: Plan) -> str:
    """The heading and the memory of a plan for a device whose rates nobody knows."""
    return "\n".join([heading(plan), "", table(plan, without=TIMES)])


MOSTLY_PADDING = 2.0


def notes(plan: Plan) -> list[str]:
    """Sentences on what `zeroshard train` does not do, on wire formats, on padding and on a partial node."""
    found = []
    if plan.workload.autocast is not None:
        found.append(
            "`zeroshard train` computes with 16-bit weights; `torch.autocast` around `Zero` is for your own loop."
        )
    found += stage_zero_note(plan.workload.precision, plan.rows)
    shown = plan.best or min(plan.rows, key=lambda row: row.needed_bytes, default=None)
    found += [] if shown is None else _off_the_device(shown, plan.host_memory_bytes)
    found += _falling_memory(plan.rows)
    worst = max((row.padding for row in plan.rows), default=1.0)
    if worst > MOSTLY_PADDING:
        what = f"buffers are up to {worst:,.0f} times as large as the parameters in them"
        block = plan.workload.states[0].block
        keeps = f"cuts no block of {block} elements" if block > 1 else "keeps tensors whole"
        found.append(f"{plan.workload.optimizer} {keeps}: over many GPUs {what}; --shard-size bounds that.")
    per_node = plan.cluster.ranks_per_node
    rest = plan.num_gpus % per_node
    if rest and plan.num_gpus > per_node:
        links = "1 link" if rest == 1 else f"{rest} links"
        what = f"The last node has {rest} of {per_node} GPUs, and so {links} to the others"
        found.append(f"{what}, for which all wait: fewer GPUs, in full nodes, may be as fast.")
    return found


def _falling_memory(rows: Sequence[Row]) -> list[str]:
    """A sentence on the first larger micro-batch that needs less memory than a smaller one: why it does."""
    for small, large in pairwise(rows):
        alike = (small.stage, small.shard_size) == (large.stage, large.shard_size)
        if not alike or large.micro_batch < small.micro_batch or large.needed_bytes >= small.needed_bytes:
            continue
        why = "the loss and the layers by tiles are cut into other parts"
        shares = small.offloaded.fraction, large.offloaded.fraction
        if shares[1] > shares[0]:
            why = f"{shares[1]:.0%} of the state is off the device, and {shares[0]:.0%} there"
        return [f"Micro-batch {large.micro_batch} needs less memory than {small.micro_batch}: {why}."]
    return []


def _off_the_device(row: Row, host_memory_bytes: int | None) -> list[str]:
    """Sentences on what is off the device in a row: where it is, and what the step waits for it."""
    num_bytes = row.host_input_bytes
    inputs = [f"Inputs of blocks wait on the host: {size(num_bytes)} of its memory a rank."] if num_bytes else []
    state = _state_off_the_device(row)
    if not inputs + state:
        return []
    on_node = f"In all that is {size(row.node_host_bytes)} of a node's host"
    if host_memory_bytes is None:
        return [*inputs, *state, f"{on_node}; --host-memory says how much it has."]
    return [*inputs, *state, f"{on_node}, which has {size(host_memory_bytes)}."]


def _state_off_the_device(row: Row) -> list[str]:
    if not row.offloaded.fraction:
        return []
    off = row.offloaded
    pinned = f", {size(off.pinned_bytes)} of it page-locked" if off.pinned_bytes else ""
    whose = "as measured" if off.measured else "a round figure until `zeroshard bench device` has measured the host"
    share = f"{off.fraction:.0%} of the state is off the device" if off.fraction < 1 else "All state is off the device"
    waits = (
        f"a step waits {seconds(off.waiting_s)} for updates by the host" if off.waiting_s else "no step waits for it"
    )
    found = [f"{share}: {size(off.host_bytes)} of host memory a rank{pinned}; {waits} ({whose})."]
    if off.file_bytes:
        written = f"{off.written_bytes_per_day(row.timing.step_s) / 2**40:,.1f} TiB"
        rate = size(2 * off.file_bytes * off.ranks_per_node / row.timing.step_s) if row.timing.step_s else "0 B"
        on_node = size(off.file_bytes * off.ranks_per_node)
        found.append(
            f"On disk: {size(off.file_bytes)} a rank, {on_node} a node, all of it read and written at each step: "
            f"{written} written a day."
        )
        if not off.has_disk_rates:
            found[-1] += (
                " No time of the disk is in these seconds: where it reads and writes less than "
                f"{rate}/s a node, the disk decides how long a step is (`zeroshard bench device --disk` measures it)."
            )
    return found


def stage_zero_note(precision: MixedPrecision, rows: Iterable[Row]) -> list[str]:
    """A sentence if a wire format was requested and some rows cannot have it."""
    if not precision.has_wire or all(row.stage != 0 for row in rows):
        return []
    return ["The rows of stage 0 have no wire format: no rank owns a shard to send or sum."]


def heading(plan: Plan) -> str:
    """The lines that say what was planned: model, devices and links, with the sources of their figures."""
    workload, cluster, device = plan.workload, plan.cluster, plan.device
    lines = [
        f"{workload.name}: {_count(workload.num_params)} parameters, {plan.dtype}, {workload.optimizer}, "
        f"{workload.num_bytes_of_states:.3g} bytes of state for each{_trained(workload)}, unsharded; "
        f"sequences of {workload.seq_len}{_shared(workload)}",
        f"{plan.num_gpus:,} x {device.name}, {device.memory_bytes / GIB:.1f} GiB each ({device.source})",
    ]
    lines.append(_computed(plan))
    per_node = min(cluster.ranks_per_node, plan.num_gpus)
    if per_node > 1:
        lines.append(
            f"{per_node} in a node over {cluster.within.name} at {cluster.within.bytes_per_s / 1e9:g} GB/s "
            f"({cluster.within.source})"
        )
    if plan.num_gpus > per_node:
        lines.append(f"nodes over {cluster.between.bytes_per_s / 1e9:g} GB/s for each GPU ({cluster.between.source})")
    return "\n".join(lines)


def _computed(plan: Plan) -> str:
    """A phrase on how the devices compute, and whether a run does so by default."""
    software, gpu = plan.software, plan.device.device_type == "cuda"
    how = {
        "compile": f"compiled {'in one graph' if plan.compiled == 'compiled' else 'in pieces'}",
        "kernels": "not compiled, with fused kernels",
        "eager": "not compiled, by torch's operations",
    }[plan.impl]
    beside = f" with {software.left_uncompiled_with}" * bool(software.left_uncompiled_with)
    default = f", as a run{beside} is by default" * (software.by_default or not gpu)
    attention = f"; attention by {software.attention}" * bool(gpu and plan.device.sustained)
    return f"the model {how}{default}{attention}"


def _shared(workload: Workload) -> str:
    """A phrase with the number of GPUs that share each sequence; empty if none do."""
    share = workload.sequence_parallel
    return "" if share == 1 else f", each shared by {share} GPUs"


def _trained(workload: Workload) -> str:
    """A phrase with the number of trained parameters, and of those that are codes; empty if no parameter is frozen."""
    if workload.num_trained_params == workload.num_params:
        return ""
    num_coded, num_bytes = workload.codes
    coded = (
        f" ({_count(num_coded)} others in {workload.frozen_format.name}, {num_bytes / num_coded:.4g} bytes)"
        if num_coded and workload.frozen_format
        else ""
    )
    return f" of the {_count(workload.num_trained_params)} that are trained{coded}"


def _count(number: int) -> str:
    """Format a count with three digits: ``8.03B``, ``842k``."""
    for letter, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:#.3g}{letter}".replace(f".{letter}", letter)
    return str(number)


def table(plan: Plan, width: int = 0, without: Sequence[str] = ()) -> str:
    """The table of rows, one per line; the recommended one has an arrow. ``without``: columns that are left out."""
    shown = lines(plan)
    marks = ["  ", *("> " if is_best else "  " for _, is_best in shown)]
    kept = [place for place, name in enumerate(COLUMNS) if name not in without]
    picked = [tuple(each[place] for place in kept) for each in (COLUMNS, *(each for each, _ in shown))]
    rows = fitted(picked, max(width - 2, 0), SPARE)
    return "\n".join(map(add, marks, columns(rows, right=range(len(kept)))))


def lines(plan: Plan) -> list[tuple[tuple[str, ...], bool]]:
    """The cells of each line, and whether it is the recommended one.

    Rows of several stages with equal cells share one line, which names these stages, at the place of the last of them.
    """
    merged: dict[tuple[str, ...], list[Row]] = {}
    for row in plan.rows:
        _, *rest = cells(row, plan.cluster.world_size)
        merged.setdefault(tuple(rest), []).append(row)
    places = {id(row): place for place, row in enumerate(plan.rows)}
    shown = sorted(merged.items(), key=lambda each: places[id(each[1][-1])])
    return [
        ((", ".join(cells(row, plan.cluster.world_size)[0] for row in rows), *rest), any(r is plan.best for r in rows))
        for rest, rows in shown
    ]


def cells(row: Row, world_size: int) -> tuple[str, ...]:
    """The cells of a row, in the order of `COLUMNS`."""
    timing = row.timing
    micro = f"{row.micro_batch} x {row.num_micro}" if row.num_micro > 1 else str(row.micro_batch)
    speed = (
        f"{seconds(timing.step_s)}",
        f"{row.tokens_per_s:,.0f}",
        "" if row.mfu is None else f"{row.mfu:.0%}",
        f"{(timing.exposed_s + timing.host_s) / timing.step_s:.0%}" if timing.step_s else "",  # all that it waits for
    )
    stage = "own" if row.stage is None else "any" if row.any_stage else str(row.stage)
    return (
        f"{stage}, copy over {row.node_copy}" if row.node_copy else stage,
        "all" if row.shard_size == world_size else f"{row.shard_size:,}",
        micro,
        "yes" if row.fits else "no",
        f"{row.needed_bytes / GIB:,.1f} GiB",
        f"{row.headroom_bytes / GIB:+,.1f} GiB",
        *(speed if row.fits else ("", "", "", "")),
        row.binds,
    )


def seconds(value: float) -> str:
    """Format seconds: ``1.23 s``, ``45.6 ms``, ``789 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def size(num_bytes: float) -> str:
    """Format bytes: ``1.5 GiB``, ``25.0 MiB``, ``3.2 KiB``; negative numbers with their sign."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"
