"""Explains a row of a plan: what is sent, the rates that times come from, and memory, each with its source.

docs/accounting.md derives the bytes that a rank sends in each collective.
"""

from __future__ import annotations

import torch

from zeroshard.host.columns import columns
from zeroshard.lab.planner.advice import describe
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds, size
from zeroshard.lab.predict.conversions import CONVERSIONS, CORE_DECODES_PER_S, DECODING
from zeroshard.lab.predict.process_memory import SOURCES
from zeroshard.lab.predict.process_memory import SPREAD as MEMORY_SPREAD
from zeroshard.lab.predict.rates import HOST_S, SPREAD_UNCALIBRATED, SUSTAINED, Software, Sustained
from zeroshard.settings.wire_formats import BlockFormat

FITTED = "fitted to published runs on such devices"
ONE_RUN = "one published run, of which not all is said"
ATTENTION = "Shah et al. 2024, FlashAttention-3, arXiv:2407.08608; Dao 2023, FlashAttention-2, arXiv:2307.08691"
NOT_MEASURED = "zeroshard.lab.predict.conversions; not measured here: zeroshard bench device does"
NCCL = "NCCL src/graph/tuning.cc, and 7 us a call that nccl-tests show"
NO_RUN = "no published run on such a device: large products alone, less what others lose while they train"


def explain(planner: Planner, row: Row) -> str:
    """Describe ``row``: its times, its collectives, the rates of device and links, and memory at the peak."""
    took = row.timing
    lines = [
        f"One step of {describe(row, planner.cluster.world_size)}: {seconds(took.step_s)}, of it "
        f"{seconds(took.compute_s)} computing and {seconds(took.exposed_s + took.host_s)} waiting; collectives run for "
        f"{seconds(took.comm_s)}.",
        "",
        *_traffic(row),
        "",
    ]
    if took.wire_s:
        what = f"Of the step quantising takes {seconds(took.wire_s)}, on the cores or the GPU that compute."
        lines += [what, ""]
    lines += [*columns([("time", "figure", "from"), *_rates(planner)]), *_ranges(row), "", *_memory(row)]
    rows = [(name.replace("_", " "), size(n), SOURCES[name]) for name, n in row.process.as_dict().items() if n]
    return "\n".join([*lines, *(columns([("beside", "bytes", "from"), *rows], right=(1,)) if rows else [])])


def _traffic(row: Row) -> list[str]:
    """Lines on the collectives of each link, with the bytes of unsharded buffers, as communicators count them."""
    rows = [
        f"{each.op} among {each.num_ranks:,} ranks, {each.link}: {each.count:,} in a step, buffers of "
        f"{size(each.num_bytes)}"
        for each in row.by_link
        if each.num_ranks > 1
    ]
    return rows or ["One rank sends nothing."]


def _rates(plan: Planner) -> list[tuple[str, str, str]]:
    """The rates that times were computed from, of device, software and links: a name, a figure and its source each."""
    device, cluster = plan.device, plan.cluster
    peak = device.matmul_flops_per_s.get(plan.workload.dtype, 0.0)
    both = f"{peak / 1e12:,.4g} TFLOP/s, {device.bytes_per_s / 1e9:,.4g} GB/s"
    rows = [("data sheet" if device.matmul_share != 1 else "device", both, device.source)]
    if device.sustained:
        rows += _sustained(plan.software, SUSTAINED[device.sustained])
    elif device.matmul_share != 1:
        rows.append(("products", f"{device.matmul_share:.2g} of the data sheet", NO_RUN))
    rows += _quantising(plan)
    links = [("within a node", cluster.within)] * (min(cluster.ranks_per_node, cluster.world_size) > 1)
    links += [("between nodes", cluster.between)] * (cluster.world_size > cluster.ranks_per_node)
    for where, link in links:
        rate = f"{link.share:.3g} of {link.bytes_per_s / 1e9:,.4g} GB/s, {seconds(link.latency_s)} a step"
        rows.append((where, rate, f"{link.name}: {link.source}"))
        for each in link.protocols:
            small = f"{each.name}: {seconds(each.call_s)} a call, {seconds(each.ring_step_s)} a step"
            rows.append((f"{where}, small", small, NCCL))
    return rows


def _quantising(plan: Planner) -> list[tuple[str, str, str]]:
    """Rows of the time of each conversion to or from a wire format; empty if there is no wire format."""
    precision, device = plan.workload.precision, plan.device
    forms = dict.fromkeys((precision.weights_format(torch.float32), precision.gradients_format(torch.float32)))
    rows = []
    names = [f"{form.name} {kind}" for form in forms if isinstance(form, BlockFormat) for kind in CONVERSIONS]
    coded, slow = plan.workload.frozen_format, f"{CORE_DECODES_PER_S / 1e9:.2g} billion numbers a second"
    names += [] if coded is None else [f"{coded.form.name} decode"]
    fast = f"its bytes over {DECODING:.0%} of the memory's rate"
    for name in names:
        measured = device.conversions.get(name)
        if measured is None and name.endswith("decode"):
            rows.append((name, slow if device.device_type == "cpu" else fast, NOT_MEASURED))
        elif measured is None:
            rows.append((name, "its bytes over the memory's rate", NOT_MEASURED))
        else:
            rows.append((name, f"{seconds(measured[0])} a call, {measured[1] * 1e9:.3g} ns a number", device.source))
    return rows


def _sustained(software: Software, rates: Sustained) -> list[tuple[str, str, str]]:
    source = FITTED if rates.fitted else ONE_RUN
    papers = ATTENTION if rates.fitted else f"an H100's FLOP/s: {ATTENTION}"
    forward, backward = rates.attention.get(software.attention, rates.attention["flash-2"])
    return [
        ("products", f"{rates.matmul:.3g} of that peak in large ones", source),
        ("attention", f"{forward:.3g} of it forward, {backward:.3g} backward, {software.attention}", papers),
        ("other operations", f"{rates.memory:.2g} of the memory's rate", source),
        ("launches", f"{seconds(HOST_S[software.impl])} each, {software.impl}", "a round figure"),
        ("collectives beside", f"{rates.beside:.2g} of their time is lost to computation", source),
    ]


def _ranges(row: Row) -> list[str]:
    """A sentence on how far predicted rates were from published ones; an empty list if the device was measured."""
    if row.spread == (1.0, 1.0):
        return []
    least, most = row.spread
    whose = " on devices, or in ways, to which nothing was fitted" if row.spread == SPREAD_UNCALIBRATED else ""
    return [
        f"Of runs that others published{whose}, rates of four of five lay between {1 / most:.2f} and "
        f"{1 / least:.2f} of what is predicted; docs/plan-accuracy.md has them."
    ]


def _memory(row: Row) -> list[str]:
    """Sentences on peak memory: when and of what, the process's other memory, and how far such predictions were off."""
    peak = row.step.peak
    parts = ", ".join(f"{name} {size(num_bytes)}" for name, num_bytes in peak.by_category.items() if num_bytes)
    lines = [f"Fullest in the {peak.where}: {size(peak.total)}: {parts}."]
    if row.process.total:
        least, most = MEMORY_SPREAD
        lines.append(
            f"Beside the engine's account the process holds {size(row.needed_bytes - peak.total)}. Of runs that others "
            f"published, four of five peaks lay between {1 / most:.2f} and {1 / least:.2f} of what is predicted."
        )
    return lines
