"""`plan`: will it fit, at which stage, how fast, and what stands in the way.

A row of a plan is one way to run: a stage, a ``shard_size``, a micro-batch. Its memory and messages are those of the
engine's own schedule over a traced micro-batch (`zeroshard.lab.predict.step`), its time a simulation of the same list
(`zeroshard.lab.predict.timeline`). Nothing is fitted to measurements but the rates of the device and its links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import nn

from zeroshard.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.planner.advice import MICRO_BATCHES, nearest_change, reason, recommended
from zeroshard.lab.planner.plan_rows import Plan, Row
from zeroshard.lab.planner.planner import HEADROOM, Planner, planner_for
from zeroshard.lab.predict.actions import Accumulate
from zeroshard.lab.predict.hardware import Calibration, Device, Link
from zeroshard.lab.predict.plan_only import Offload, PlanOnly
from zeroshard.lab.predict.rates import Attention, Impl
from zeroshard.models.adapters import Lora
from zeroshard.zero import STAGES, LocalSteps, ShardingStrategy
from zeroshard.zero.buffers.unit_choice import UnitChoice


def plan(
    model: str | nn.Module,
    *,
    world_size: int = 1,
    stage: int | ShardingStrategy | None = None,
    shard_size: int | None = None,
    gpu: str | Device | Calibration = "h100-80gb",
    network: str | Link = "400Gbit/s",
    within_node: str | Link | None = None,
    gpus_per_node: int = 8,
    micro_batch: int | None = None,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str = "bfloat16",
    reduce_dtype: str | None = None,
    wire: Mapping[str, Any] = MappingProxyType({}),
    optimizer: str = "adamw",
    accumulate: Accumulate | None = None,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
    kernels: Choice = "auto",
    impl: Impl | None = None,
    attention: Attention = "flash-2",
    document_mask: bool = False,
    lora: Lora | None = None,
    headroom: float = HEADROOM,
    units: UnitChoice | None = None,
    inputs: Callable[[int], tuple[Any, ...]] | None = None,
    overrides: Mapping[str, object] = MappingProxyType({}),
    local_steps: LocalSteps | None = None,
    autocast: bool = False,
    master_weights: bool = True,
    fp8: bool = False,
    optimizer_in_backward: bool = False,
    offload: Offload = "none",
    tensor_parallel: int = 1,
    context_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> Plan:
    """Predict memory, traffic and time of training ``model``, at one stage or at each.

    Args:
        model: a preset's name, or any module, on any device and best on the meta device: it is not changed.
        world_size: ranks, one a GPU.
        stage: 0, 1, 2, 3 or a row of one's own; None: all four, which are one where ``world_size`` is 1.
        shard_size: ranks that shard together; None: all, and in a world of several nodes also fewer.
        gpu: a row of `zeroshard.lab.predict.hardware.DEVICES`, a file that `zeroshard bench device` wrote, or a
        `Device`.
        network: what each GPU has to other nodes: a bandwidth with its unit, a row of `LINKS`, or a `Link`.
        within_node: likewise to its neighbours; None: what the GPU is sold with, or what was measured.
        gpus_per_node: of a full node.
        micro_batch: rows (sequences) of a rank in one forward; None: powers of two, as many as fit.
        global_batch: rows of a step over all ranks, by gradient accumulation; None: one micro-batch of each rank.
        seq_len: tokens of a sequence; None: the longest that the model is made for.
        dtype: of forward and backward; masters and states keep the model's own.
        reduce_dtype: of gradients on their way; None: the masters'.
        wire: what travels in another form: ``gather``, ``reduce`` and ``block`` of `zeroshard.zero.MixedPrecision`;
            stage 0 has none.
        optimizer: by name, as torch calls it.
        accumulate, prefetch, reshard_after_forward: as `zeroshard.Zero` takes them.
        kernels: as models take it.
        impl: who computes on a GPU: ``eager`` (operation by operation), ``compile`` or ``kernels`` (fused by hand);
            None: as ``kernels`` says.
        attention: which fused kernel a GPU runs: ``flash-1``, ``flash-2``, ``flash-3`` or ``cudnn``.
        document_mask: whether attention stays inside a document, of our models; it costs a mask.
        lora: adapters that alone are trained, of a preset or a Hugging Face model by name.
        headroom: share of memory that must stay free for a row to fit.
        units: as `zeroshard.Zero` takes them; None: the model's blocks.
        inputs: for a module that is no language model of ours: from rows to the arguments of one micro-batch.
        overrides: fields of the preset's configuration to change.
        local_steps: how replicas of ``shard_size`` ranks meet; None: at each step, by their gradients.
        autocast: weights and gradients in fp32, cast to ``dtype`` around forward by `torch.autocast`.
        master_weights: whether 16-bit weights have fp32 masters; False: weights, gradients and states are in ``dtype``.
        fp8, optimizer_in_backward, offload, tensor_parallel, context_parallel, pipeline_parallel: what zeroshard does
            not do, estimated as `zeroshard.lab.predict.plan_only` says; ``world_size`` counts all GPUs.

    Raises:
        UserError: a ValueError; what cannot be planned, by its field, in one line.
    """
    if local_steps is not None and (shard_size is None or shard_size >= world_size):
        what = f"{local_steps.every} needs replicas, and {world_size} GPUs are one"
        raise UserError("replicas.every", what, "give a shard_size below the GPUs: those of one replica")
    planner = planner_for(
        model,
        world_size=world_size,
        gpu=gpu,
        network=network,
        within_node=within_node,
        gpus_per_node=gpus_per_node,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        wire=wire,
        optimizer=optimizer,
        accumulate=accumulate,
        prefetch=prefetch,
        reshard_after_forward=reshard_after_forward,
        kernels=kernels,
        impl=impl,
        attention=attention,
        document_mask=document_mask,
        lora=lora,
        headroom=headroom,
        units=units,
        inputs=inputs,
        overrides=overrides,
        autocast=autocast,
        master_weights=master_weights,
        beside=PlanOnly(fp8, optimizer_in_backward, offload, tensor_parallel, context_parallel, pipeline_parallel),
    )
    world_size = planner.cluster.world_size
    stages = _stages(stage, shard_size, world_size, local_steps)
    shown = stages if world_size > 1 else stages[:1]  # one rank shards nothing: all stages are alike there
    rows = list(_rows(planner, shown, micro_batch, shard_size, local_steps))
    best = recommended(rows)
    advice = reason(planner, rows, best) if best is not None else nearest_change(planner, stages, micro_batch, rows)
    return Plan(
        workload=planner.workload,
        device=planner.device,
        cluster=planner.cluster,
        rows=tuple(rows),
        best=best,
        advice=advice,
        beside=planner.beside,
        software=planner.software,
    )


def _stages(
    stage: int | ShardingStrategy | None, shard_size: int | None, world_size: int, local_steps: LocalSteps | None
) -> tuple[int | ShardingStrategy, ...]:
    """The stages to look at: those that shard, where a ``shard_size`` is asked for."""
    given = stage is not None and not isinstance(stage, ShardingStrategy)
    if given and (isinstance(stage, bool) or stage not in STAGES):
        raise UserError("stage", f"{stage!r} is not a ZeRO stage", "choose 0, 1, 2 or 3")
    if shard_size is not None:
        if shard_size < 1 or world_size % shard_size:
            what = f"{shard_size} does not divide a world of {world_size}"
            raise UserError("shard_size", what, "choose a divisor of it")
        if stage == 0 and local_steps is None:
            raise UserError("shard_size", "stage 0 shards nothing", "choose stage 1, 2 or 3, or leave it out")
    if stage is not None:
        return (stage,)
    return tuple(each for each in STAGES if each or shard_size is None or local_steps is not None)


def _rows(
    planner: Planner,
    stages: Sequence[int | ShardingStrategy],
    micro_batch: int | None,
    shard_size: int | None,
    local_steps: LocalSteps | None,
) -> Iterator[Row]:
    candidates = micro_batches(planner, micro_batch)
    largest: dict[int | ShardingStrategy, int] = {}
    for stage in stages:
        for candidate in candidates:
            row = planner.row(stage, candidate, shard_size, local_steps)
            yield row
            if not row.fits:
                break
            largest[stage] = candidate
    if shard_size is not None:
        return
    for size in planner.smaller_groups():
        for stage in stages:
            if stage != 0:
                fitting = [each for each in candidates if each <= largest.get(stage, candidates[0])]
                yield _largest_fitting(planner, stage, fitting, size)


def _largest_fitting(
    planner: Planner, stage: int | ShardingStrategy, candidates: Sequence[int], shard_size: int
) -> Row:
    """The row of the largest of ``candidates`` that fits, else of the smallest."""
    row = planner.row(stage, candidates[-1], shard_size)
    for candidate in reversed(candidates[:-1]):
        if row.fits:
            break
        row = planner.row(stage, candidate, shard_size)
    return row


def micro_batches(planner: Planner, given: int | None) -> list[int]:
    """The micro-batches to look at.

    Raises:
        UserError: the one given does not divide the rows of a rank.
    """
    if given is not None:
        if given < 1:
            raise UserError("micro_batch", f"{given} is below 1", "give 1 or more sequences")
        if not planner.num_micro(given):
            what = f"{planner.global_batch} is no multiple of {given} (micro_batch) x {planner.cluster.world_size} GPUs"
            raise UserError("global_batch", what, "change one of the three")
        return [given]
    return [size for size in MICRO_BATCHES if planner.num_micro(size)]
