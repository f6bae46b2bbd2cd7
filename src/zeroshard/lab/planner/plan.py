"""`plan`: predicts whether a training job fits, at which stage, how fast it runs, and what the bottleneck is.

A row of a plan is one way to run: a stage, a ``shard_size``, a micro-batch. Its memory and collectives come from the
engine's own schedule over a traced micro-batch (`zeroshard.lab.predict.step`), and its time from a simulation of that
schedule (`zeroshard.lab.predict.timeline`). Only the rates of devices and links are fitted to measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from zeroshard.host.errors import UserError
from zeroshard.host.host_memory import require_memory
from zeroshard.lab.planner.advice import reason, recommended
from zeroshard.lab.planner.changes import changes_that_fit
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.planner import Planner, copy_sizes, planner_for
from zeroshard.lab.planner.ways import Ways
from zeroshard.settings import rules
from zeroshard.zero import STAGES, LocalSteps, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD


def plan(
    model: str | nn.Module,
    *,
    stage: int | ShardingStrategy | None = None,
    shard_size: int | None = None,
    micro_batch: int | None = None,
    local_steps: LocalSteps | None = None,
    **given: Any,
) -> Plan:
    """Predict memory, traffic and time of training ``model``, at one stage or at each.

    Args:
        model: a preset's name, or any module. It is not changed, and may be on any device, best on the meta device.
        stage: 0, 1, 2, 3 or your own row of the stage table; None: all four, or one if ``world_size`` is 1 and no
            weights leave the device, because stages do not differ then.
        shard_size: number of ranks that shard together; None: all ranks, and with several nodes also fewer.
        micro_batch: rows (sequences) of a rank in one forward; None: powers of two, as many as fit.
        local_steps: how replicas of ``shard_size`` ranks synchronise; None: they reduce gradients at each step.
        given: GPUs, links, dtypes, optimizer and all else: the fields of `zeroshard.lab.planner.request.Request`.

    Raises:
        UserError: (a ValueError) the job cannot be planned; the message names the argument.
    """
    planner, ways = asked(model, stage, shard_size, micro_batch, local_steps, **given)
    found = planned(planner, ways)
    if found.best is None:
        _require_host_memory(planner, found.rows)
    return found


def planned(planner: Planner, ways: Ways) -> Plan:
    """The plan of a job in the ways that were asked for.

    Raises:
        UserError: as `Ways.rows`.
    """
    rows = list(ways.rows(planner))
    best = recommended(rows)
    return Plan(
        workload=planner.workload,
        device=planner.device,
        cluster=planner.cluster,
        rows=tuple(rows),
        best=best,
        advise=partial(reason, planner, rows, best) if best else partial(changes_that_fit, planner, ways, rows),
        software=planner.software,
        compiled=planner.compiled,
        host_memory_bytes=planner.asked.host_memory_bytes,
    )


def asked(
    model: str | nn.Module,
    stage: int | ShardingStrategy | None,
    shard_size: int | None,
    micro_batch: int | None,
    local_steps: LocalSteps | None,
    **given: Any,
) -> tuple[Planner, Ways]:
    """The job of these arguments of `plan`, and the ways to run it; errors are those of `plan`."""
    num_gpus = given.get("world_size", 1)
    if local_steps is not None:
        rules.check_local_steps("local_steps.every", local_steps.every, shard_size, num_gpus)
        rules.check_replicas_share(given.get("sequence_parallel", 1), shard_size or num_gpus)
    planner = planner_for(model, **given)
    stages = _stages(stage, shard_size, planner.cluster.world_size, local_steps)
    check_node_copy(planner, stage, shard_size)
    if planner.asked.reproducible:
        number = planner.asked.reproducible
        rules.check_same_bits(number, shard_size=shard_size, local_steps=local_steps is not None)
    check_wire_nodes(planner)
    return planner, Ways(stages, micro_batch, shard_size, local_steps)


def _require_host_memory(planner: Planner, rows: Sequence[Row]) -> None:
    """Raise UserError if rows fit their devices, and none of them the memory of a node's host."""
    least = min((row.node_host_bytes for row in rows if row.fits_device), default=0)
    num_ranks = min(planner.cluster.ranks_per_node, planner.cluster.world_size)
    field = "model.activation_checkpointing" if planner.asked.offload is None else "offload.state"
    require_memory(least, planner.asked.host_memory_bytes, num_ranks, "a node", field)


def check_wire_nodes(planner: Planner) -> None:
    """Raise UserError if the GPUs do not divide into several groups of ``wire.node_size`` ranks, each within a node."""
    size, cluster = planner.workload.precision.node_size, planner.cluster
    if size is not None:
        rules.check_groups("wire.node_size", size, cluster.world_size, copy_sizes(cluster.world_size, cluster))


def check_node_copy(planner: Planner, stage: int | ShardingStrategy | None, shard_size: int | None) -> None:
    """Raise UserError for a second copy of weights that is useless or impossible, in ``node_copy`` or the user's row.

    Args:
        planner: the planner with its ``node_copy``.
        stage: the requested stage; None: all stages.
        shard_size: the requested shard size; None: all ranks shard together.
    """
    own = stage.secondary_shard_size if isinstance(stage, ShardingStrategy) else None
    name, size = ("node_copy", planner.asked.node_copy) if own is None else ("secondary_shard_size", own)
    if not size:
        return
    if own is not None and planner.asked.node_copy:
        raise UserError(
            "node_copy", f"{planner.asked.node_copy} is given, and the row has {own}", "leave one of the two out"
        )
    row = stage if isinstance(stage, ShardingStrategy) else STAGES[3 if stage is None else stage]
    reshards = row.reshard_after_forward and planner.asked.reshard_after_forward
    rules.check_second_copy(name, size, f"stage {stage}", shards=row.params is SHARD, reshards=reshards)
    shards = shard_size or planner.cluster.world_size
    rules.check_groups(name, size, shards, copy_sizes(shards, planner.cluster))


def _stages(
    stage: int | ShardingStrategy | None, shard_size: int | None, world_size: int, local_steps: LocalSteps | None
) -> tuple[int | ShardingStrategy, ...]:
    """The stages to plan: with a ``shard_size`` those that shard."""
    given = stage is not None and not isinstance(stage, ShardingStrategy)
    if given and (isinstance(stage, bool) or stage not in STAGES):
        raise UserError("stage", f"{stage!r} is not a ZeRO stage", "choose 0, 1, 2 or 3")
    if shard_size is not None:
        rules.check_shard_size(shard_size, world_size)
        if stage == 0 and local_steps is None:
            rules.check_something_is_sharded(0)
    if stage is not None:
        return (stage,)
    return tuple(each for each in STAGES if each or shard_size is None or local_steps is not None)
