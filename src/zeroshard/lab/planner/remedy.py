"""Answers ``plan --ask remedy``: which remedy for a slow network is enough, and what each costs.

A remedy sends fewer bytes than the stages do: 16-bit gradients, int8 both ways, gradients summed inside a node before
they are sent, a second copy of weights in the node, state sharded inside a node only, or fewer outer steps.
Each is compared with the fastest step on a network of unlimited bandwidth. For local steps the answer is the smallest
``every`` that keeps `ENOUGH` of that speed: a larger one only makes the loss worse, by how much has to be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from zeroshard.columns import columns
from zeroshard.errors import UserError
from zeroshard.lab.planner.advice import GIB
from zeroshard.lab.planner.inverse import HIGHEST_BYTES_PER_S, Answer, most, on_network, require_network
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner, copy_sizes
from zeroshard.lab.planner.show import seconds, stage_zero_note
from zeroshard.zero import LocalSteps, MixedPrecision

ENOUGH = 0.8  # share of the compute-bound speed that is enough
MOST_STEPS = 4096  # most local steps for each outer step; runs have some thousands of steps


@dataclass(frozen=True)
class Remedy:
    """One way to send fewer bytes, with its plan."""

    name: str  # the remedy in words
    row: Row  # its predictions; for local steps, with the smallest ``every`` that is enough, or else with `MOST_STEPS`
    share: float  # its speed as a share of the compute-bound speed; `ENOUGH` of it is enough

    def as_dict(self, base: Row) -> dict[str, Any]:
        """The remedy as a dict, for JSON; ``base``: the row that its memory is compared with."""
        return {
            "remedy": self.name,
            "stage": self.row.stage,
            "shard_size": self.row.shard_size,
            "node_copy": self.row.node_copy,
            "node_size": self.row.node_size,
            "micro_batch": self.row.micro_batch,
            "every": self.row.outer_steps.every,
            "step_s": self.row.timing.step_s,
            "quantise_s": self.row.timing.wire_s,
            "share_of_compute_bound_speed": self.share,
            "enough": self.share >= ENOUGH,
            "needed_bytes": self.row.needed_bytes,
            "more_bytes": self.row.needed_bytes - base.needed_bytes,
        }


def remedies(
    planner: Planner, stages: Sequence[int], micro_batch: int | None = None, shard_size: int | None = None
) -> Answer:
    """Every remedy that fits, with its speed and memory; the value is the best one's local steps per outer step.

    Args:
        planner: the workload's planner, on the given network.
        stages: the stages to plan.
        micro_batch: rows of a rank in one forward; None: 1.
        shard_size: ranks of a replica; None: a node's ranks, or one rank if all are in one node.

    Raises:
        UserError: there is only one GPU, or nothing fits at any of the stages.
    """
    require_network(planner)
    rows = micro_batch or 1
    fast = on_network(planner, HIGHEST_BYTES_PER_S)
    there = [row for row in (fast.row(stage, rows) for stage in stages) if row.fits]
    cluster = planner.cluster
    full_nodes = cluster.world_size > cluster.ranks_per_node and cluster.world_size % cluster.ranks_per_node == 0
    alone = shard_size or (cluster.ranks_per_node if full_nodes else 1)
    inside = [row for row in (fast.row(stage, rows, alone, LocalSteps(MOST_STEPS)) for stage in stages) if row.fits]
    if not there and not inside:
        what = f"nothing fits on {planner.cluster.world_size} x {planner.device.name} at micro-batch {rows}"
        raise UserError("ask", f"remedy: {what}", "ask --ask fewest-gpus, or give another --micro-batch")
    flat = list(_flat(planner, stages, rows, alone))
    bound = max(row.tokens_per_s for row in [*there, *inside, *(row for _, row in flat)])
    every = [*flat, *_local(planner, stages, rows, alone, bound)]
    found = [Remedy(name, row, row.tokens_per_s / bound) for name, row in every]
    base = min((each.row for each in found), key=lambda row: row.needed_bytes)
    enough = [each for each in found if each.share >= ENOUGH]
    best = min(enough, key=lambda each: (each.row.outer_steps.every, each.row.needed_bytes), default=None)
    return Answer(
        None if best is None else best.row.outer_steps.every,
        "local steps for each outer step",
        _told(planner, found, base, best),
        tuple(each.as_dict(base) for each in found),
    )


def _flat(planner: Planner, stages: Sequence[int], rows: int, alone: int) -> Iterator[tuple[str, Row]]:
    """Yield remedies without local steps, for each wire format: state sharded over all ranks, the same with a second
    copy of weights in the node, and state sharded over a replica's ranks.
    """
    size = planner.cluster.ranks_per_node
    in_node = size if size in copy_sizes(planner.cluster.world_size, planner.cluster) else 0
    copied = planner.node_copy or in_node
    for precision in _wires(planner.workload.precision, in_node):
        each = planner.on(workload=replace(planner.workload, precision=precision), node_copy=0)
        for stage in stages:
            if not stage and precision.has_wire and precision != planner.workload.precision:
                continue  # stage 0 has no wire formats
            words = _wire_in_words(precision, stage)
            found = [(f"stage {stage}{words}", each.row(stage, rows))]
            if stage == 3 and copied:
                found.append((f"stage 3, copy over {copied}{words}", each.on(node_copy=copied).row(stage, rows)))
            if stage and 1 < alone < planner.cluster.world_size and precision.node_size is None:
                found.append((f"stage {stage} over {alone}{words}", each.row(stage, rows, alone)))
            yield from (pair for pair in found if pair[1].fits)


def _wires(given: MixedPrecision, node_size: int) -> list[MixedPrecision]:
    """The policies to plan, each once: as given, 16-bit gradients, int8 both ways, and int8 with sums inside nodes."""
    narrow = replace(given, reduce_dtype=torch.bfloat16, reduce=None, node_size=None)
    packed = replace(given, gather="int8", reduce="int8", node_size=None)
    by_nodes = [replace(packed, node_size=given.node_size or node_size)] if given.node_size or node_size else []
    return list(dict.fromkeys([given, narrow, packed, *by_nodes]))


def _wire_in_words(precision: MixedPrecision, stage: int) -> str:
    """A phrase that names wire formats: ``, weights and gradients in int8``; empty if there are none."""
    reduced = precision.reduce_dtype if precision.reduce is None or not stage else precision.reduce
    travels = {"weights": precision.gather if stage else None, "gradients": reduced}
    named = {what: str(form).removeprefix("torch.") for what, form in travels.items() if form is not None}
    nodes = f", added up in nodes of {precision.node_size}" if precision.node_size and stage else ""
    if len(set(named.values())) == 1:
        return f", {' and '.join(named)} in {next(iter(named.values()))}{nodes}"
    return "".join(f", {what} in {form}" for what, form in named.items()) + nodes


def _local(planner: Planner, stages: Sequence[int], rows: int, alone: int, bound: float) -> Iterator[tuple[str, Row]]:
    """Yield remedies with local steps, at the lowest stage that fits: in several wire formats."""
    kinds = {
        "local steps": LocalSteps(MOST_STEPS),
        "local steps, wire in bfloat16": LocalSteps(MOST_STEPS, wire=torch.bfloat16),
        "local steps, wire in int8": LocalSteps(MOST_STEPS, wire="int8"),
        "local steps, wire in int4": LocalSteps(MOST_STEPS, wire="int4"),
    }
    for name, settings in kinds.items():
        lowest = next((stage for stage in sorted(stages) if planner.row(stage, rows, alone, settings).fits), None)
        if lowest is None:
            continue

        def row_of(every: int, settings: LocalSteps = settings, stage: int = lowest) -> Row:
            return planner.row(stage, rows, alone, replace(settings, every=every))

        def is_slow(every: int, row_of: Callable[[int], Row] = row_of) -> bool:
            return every == 1 or row_of(every).tokens_per_s < ENOUGH * bound

        row = row_of(min(most(is_slow, MOST_STEPS - 1) + 1, MOST_STEPS))
        copied = f", copy over {row.node_copy}" if row.node_copy else ""
        yield f"{name}, stage {lowest} over {alone}{copied}", row


def _told(planner: Planner, found: Sequence[Remedy], base: Row, best: Remedy | None) -> str:
    head = ("remedy", "every", "step", "of compute-bound", "memory", "more", f"{ENOUGH:.0%}")
    cells = [
        (
            each.name,
            f"{each.row.outer_steps.every:,}",
            seconds(each.row.timing.step_s),
            f"{each.share:.1%}",
            f"{each.row.needed_bytes / GIB:.2f} GiB",
            f"{(each.row.needed_bytes - base.needed_bytes) / GIB:+.2f} GiB",
            "yes" if each.share >= ENOUGH else "no",
        )
        for each in found
    ]
    cluster = planner.cluster
    bits = 8 * (cluster.within if cluster.world_size <= cluster.ranks_per_node else cluster.between).bytes_per_s
    rate = f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
    where = f"{planner.workload.name} on {cluster.world_size:,} x {planner.device.name}, {rate}"
    lines = [f"{where} for each GPU, micro-batch {found[0].row.micro_batch}", ""]
    lines += columns([head, *cells], right=range(1, len(head)))
    if best is None:
        what = "of the compute-bound speed; larger micro-batches send less a token."
        conclusion = f"Nothing here keeps {ENOUGH:.0%} {what}"
    elif best.row.outer_steps.every == 1:
        conclusion = f"{best.name} keeps {best.share:.0%} with all ranks at each step."
    else:
        every = f"an outer step every {best.row.outer_steps.every:,} steps"
        conclusion = f"{best.name} keeps {best.share:.0%} with {every}; measure the loss."
    return "\n".join([*lines, "", conclusion, *stage_zero_note(planner.workload.precision, [e.row for e in found])])
