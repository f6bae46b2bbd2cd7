"""`Planner`: what all rows of a plan have in common, and any one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zeroshard.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.planner.plan_rows import Row, what_binds
from zeroshard.lab.predict.actions import Accumulate, Settings, Step
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.hardware import LINKS, Calibration, Device, Link, find_device, find_link
from zeroshard.lab.predict.meetings import Meetings, meetings_of
from zeroshard.lab.predict.plan_only import PlanOnly, more_seconds, pipelined, with_rates, with_seconds
from zeroshard.lab.predict.process_memory import Process, ProcessMemory, process_memory
from zeroshard.lab.predict.rates import SPREAD_UNCALIBRATED, Attention, Impl, Loss, Software, spread
from zeroshard.lab.predict.step import least_bytes, step_of
from zeroshard.lab.predict.timeline import Cluster, Timing, simulate
from zeroshard.lab.predict.workload import DTYPES, Workload, workload_of
from zeroshard.models.adapters import Lora
from zeroshard.zero import STAGES, LocalSteps, MixedPrecision, ShardingStrategy
from zeroshard.zero.buffers.unit_choice import UnitChoice
from zeroshard.zero.strategy import SHARD

HEADROOM = 0.02  # of a device's memory that stays free: what nobody foresaw


@dataclass
class Planner:
    """What all rows have in common; the inverse questions ask it for rows of their own.

    Attributes:
        workload: what is trained.
        device, cluster: on what.
        global_batch: rows of a step over all ranks; 0: one micro-batch of each.
        accumulate, prefetch, reshard_after_forward: as `zeroshard.Zero` takes them.
        headroom: share of memory that stays free.
        software: who computes.
        beside: what zeroshard does not do, and a plan can say. In ``cluster`` the GPUs of a tensor and of a pipeline
            count as one.
    """

    workload: Workload
    device: Device
    cluster: Cluster
    global_batch: int = 0
    accumulate: Accumulate | None = None
    prefetch: int = 1
    reshard_after_forward: bool = True
    headroom: float = HEADROOM
    software: Software = field(default_factory=Software)
    beside: PlanOnly = field(default_factory=PlanOnly)

    @property
    def ranks_a_place(self) -> int:
        """GPUs that hold the same shard's parts: those of a tensor and a pipeline."""
        return self.beside.tensor_parallel * self.beside.pipeline_parallel

    @property
    def num_gpus(self) -> int:
        """All of them; ``cluster`` counts a tensor's and a pipeline's as one."""
        return self.cluster.world_size * self.ranks_a_place

    @property
    def wires(self) -> Cluster:
        """All GPUs, and their links."""
        per_node = self.cluster.ranks_per_node * self.beside.tensor_parallel
        return replace(self.cluster, world_size=self.num_gpus, ranks_per_node=per_node)

    def num_micro(self, micro_batch: int) -> int:
        """Micro-batches of a step; 0 where the global batch is no multiple of what one of them has."""
        if not self.global_batch:
            return 1
        at_once = micro_batch * self.cluster.world_size // self.beside.context_parallel
        return self.global_batch // at_once if self.global_batch % at_once == 0 else 0

    def row(
        self,
        stage: int | ShardingStrategy,
        micro_batch: int,
        shard_size: int | None = None,
        local_steps: LocalSteps | None = None,
    ) -> Row:
        """One way to run; ``shard_size`` None: all ranks; ``local_steps`` None: replicas meet at each step."""
        strategy = stage if isinstance(stage, ShardingStrategy) else STAGES[stage]
        strategy = replace(
            strategy, reshard_after_forward=strategy.reshard_after_forward and self.reshard_after_forward
        )
        world_size = self.cluster.world_size
        shards = shard_size or world_size
        buffers = self.part.buffers(shards, replicated=shards < world_size)
        step = self.step(strategy, micro_batch, shards, alone=local_steps is not None)
        timing = simulate(step, self.device, self.cluster, software=self.software)
        timing = with_seconds(timing, self._more_seconds(step, timing, micro_batch))
        meetings = Meetings()
        if local_steps is not None:
            meetings = meetings_of(buffers, local_steps, strategy, self.cluster, timing.step_s)
            timing = meetings.added_to(timing)
        process = self._process_memory(step, strategy, micro_batch, shards)
        needed = step.peak.total + process.total + meetings.held_bytes
        left = self.device.memory_bytes - needed
        fits = left >= self.headroom * self.device.memory_bytes
        tokens_per_s = step.tokens * world_size / timing.step_s if timing.step_s else 0.0
        peak = self.device.matmul_flops_per_s.get(self.workload.dtype)
        mfu = None if not peak else tokens_per_s * self.workload.num_flops_per_token / (self.num_gpus * peak)
        return Row(
            stage=stage if isinstance(stage, int) else None,
            shard_size=shards,
            micro_batch=micro_batch,
            num_micro=max(self.num_micro(micro_batch), 1),
            step=step,
            comm_bytes=process.nccl,
            process=process,
            needed_bytes=needed,
            headroom_bytes=left,
            fits=fits,
            timing=timing,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            binds=what_binds(timing, fits=fits),
            spread=SPREAD_UNCALIBRATED if self.beside.named else spread(self.device),
            meetings=meetings,
            padding=padding_of(buffers),
        )

    def _process_memory(
        self, step: Step, strategy: ShardingStrategy, micro_batch: int, num_shards: int
    ) -> ProcessMemory:
        workload = self.part
        config = getattr(workload.model, "config", None)
        num_logits = micro_batch * workload.seq_len * getattr(config, "vocab_size", 0)
        what = Process(
            num_logits=num_logits // self.beside.tensor_parallel,
            group_sizes=(num_shards, self.cluster.world_size // num_shards),
            own_loss=workload.kernels != "reference",
            shards_grads=strategy.grads is SHARD and num_shards > 1,
            recomputes=getattr(config, "activation_checkpointing", "none") != "none",
            unread_bytes=workload.unread_bytes(micro_batch),
        )
        return process_memory(step, self.device, self.software, what)

    @property
    def part(self) -> Workload:
        """What one rank computes of the workload."""
        beside = self.beside
        if beside.num_ranks == 1:
            return self.workload
        return self.workload.part(beside.tensor_parallel, beside.context_parallel, beside.pipeline_parallel)

    def _more_seconds(self, step: Step, timing: Timing, micro_batch: int) -> dict[str, float]:
        if not self.beside.named:
            return {}
        stream = self.part.stream(micro_batch, self.beside.context_parallel) if self.beside.num_ranks > 1 else None
        num_micro = max(self.num_micro(micro_batch), 1)
        return more_seconds(self.beside, step, timing, stream, self.device, self.wires, num_micro)

    def step(self, strategy: ShardingStrategy, micro_batch: int, num_shards: int, *, alone: bool = False) -> Step:
        """The engine's step; ``alone``: of a replica that takes it without the others."""
        workload, beside = self.part, self.beside
        state, whole_state = workload.states
        settings = self._settings(strategy, micro_batch, num_shards, alone=alone)
        trace = workload.trace(micro_batch, self.device.device_type)
        buffers = workload.buffers(num_shards, replicated=num_shards < self.cluster.world_size)
        step = step_of(trace, buffers, state, settings, whole_state)
        vocab_size = getattr(getattr(workload.model, "config", None), "vocab_size", 0)
        vocab_size = -(-vocab_size // beside.tensor_parallel)
        return with_rates(pipelined(step, beside, settings.num_micro, trace.activation_bytes), beside, vocab_size)

    def cannot_fit(self, stage: int | ShardingStrategy, micro_batch: int) -> bool:
        """Whether weights, states and activations are too much already: a quick answer for a row over all ranks."""
        strategy = stage if isinstance(stage, ShardingStrategy) else STAGES[stage]
        workload, num_shards = self.part, self.cluster.world_size
        settings = self._settings(strategy, micro_batch, num_shards)
        trace = workload.trace(micro_batch, self.device.device_type)
        state, whole_state = workload.states
        least = least_bytes(trace, workload.buffers(num_shards), state, settings, whole_state)
        least -= workload.unread_bytes(micro_batch)  # which compiled code does not keep
        return least > (1 - self.headroom) * self.device.memory_bytes

    def _settings(
        self, strategy: ShardingStrategy, micro_batch: int, num_shards: int, *, alone: bool = False
    ) -> Settings:
        workload, on_cuda, beside = self.part, self.device.device_type == "cuda", self.beside
        offloads, num_micro = beside.offload != "none", max(self.num_micro(micro_batch), 1)
        casts = any(workload.precision.compute_dtype(p.dtype) != p.dtype for p in workload.model.parameters())
        return Settings(
            strategy=strategy,
            precision=workload.precision,
            num_micro=num_micro,
            accumulate=self.accumulate,
            prefetch=self.prefetch,
            num_replicas=1 if alone else self.cluster.world_size // num_shards,
            uniform_order=not on_cuda,
            device_type=self.device.device_type,
            fused_copies=on_cuda and casts and workload.optimizer == "AdamW" and workload.kernels != "reference",
            clips=not beside.optimizer_in_backward,
            frees_grads=beside.optimizer_in_backward or (offloads and (num_micro == 1 or strategy.grads is SHARD)),
            offloads=offloads,
        )

    def on(self, **changes: Any) -> Planner:
        """The same with other settings of the cluster (``world_size``, ``within``, ``between``) or of its own."""
        own = {key: changes.pop(key) for key in list(changes) if key in ("workload", "device", "global_batch")}
        return replace(self, cluster=replace(self.cluster, **changes), **own)

    def smaller_groups(self) -> list[int]:
        """Shard sizes below the world: a node's ranks, and 4, 16, ... times as many, where they divide it."""
        found, size = [], self.cluster.ranks_per_node
        while size < self.cluster.world_size:
            if size > 1 and self.cluster.world_size % size == 0:
                found.append(size)
            size *= 4
        return found


def padding_of(buffers: Sequence[Buffer]) -> float:
    """How many times as large buffers are as the parameters in them."""
    numel = sum(buffer.layout.numel for buffer in buffers)
    return sum(buffer.layout.padded_numel for buffer in buffers) / max(numel, 1)


def planner_for(
    model: str | nn.Module,
    *,
    world_size: int = 1,
    gpu: str | Device | Calibration = "h100-80gb",
    network: str | Link = "400Gbit/s",
    within_node: str | Link | None = None,
    gpus_per_node: int = 8,
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
    loss: Loss | None = None,
    document_mask: bool = False,
    lora: Lora | None = None,
    headroom: float = HEADROOM,
    units: UnitChoice | None = None,
    inputs: Callable[[int], tuple[Any, ...]] | None = None,
    overrides: Mapping[str, object] = MappingProxyType({}),
    autocast: bool = False,
    master_weights: bool = True,
    beside: PlanOnly | None = None,
) -> Planner:
    """A `Planner`; arguments and errors are those of `plan`."""
    _require_count("gpus", world_size, 1)
    _require_count("gpus_per_node", gpus_per_node, 1)
    _require_count("global_batch", 1 if global_batch is None else global_batch, 1)
    _require_count("seq_len", 1 if seq_len is None else seq_len, 1)
    _require_count("prefetch", prefetch, 0)
    if not 0 <= headroom < 1:
        raise UserError("headroom", f"{headroom} is no share of the memory", "give a number in [0, 1)")
    found = gpu if isinstance(gpu, Calibration) else Calibration(gpu) if isinstance(gpu, Device) else find_device(gpu)
    device = found.device
    precision = _precision(dtype, reduce_dtype)
    precision, weights, cast_to = _kept_as(precision, dtype, autocast=autocast, master_weights=master_weights)
    precision = replace(precision, **wire)
    beside = beside or PlanOnly()
    beside.check(world_size, device, dtype)
    if (impl == "eager" or autocast) and kernels == "auto":
        kernels = "reference"
    software = Software(impl or ("eager" if kernels == "reference" else "kernels"), attention, loss)
    workload = workload_of(
        model,
        seq_len=seq_len,
        precision=precision,
        optimizer=optimizer,
        kernels=kernels,
        document_mask=document_mask,
        lora=lora,
        units=units,
        inputs=inputs,
        overrides=overrides,
        weights=weights,
        autocast=cast_to,
    )
    _require_expressible(workload, beside, accumulates=bool(global_batch))
    if workload.dtype in DTYPES and workload.dtype not in device.matmul_flops_per_s:
        served = ", ".join(device.matmul_flops_per_s)
        raise UserError("dtype", f"a {device.name} does not compute in {workload.dtype}", f"choose {served}")
    num_places, per_node = world_size // (beside.tensor_parallel * beside.pipeline_parallel), gpus_per_node
    per_node = max(gpus_per_node // beside.tensor_parallel, 1)
    cluster = _cluster(num_places, per_node, within_node, network, found)
    num_replicas = world_size // beside.num_ranks
    if global_batch and global_batch % num_replicas:
        where = f"{world_size} GPUs" if beside.num_ranks == 1 else f"{num_replicas} replicas of {world_size} GPUs"
        what = f"{global_batch} sequences cannot be shared out to {where}"
        raise UserError("global_batch", what, f"give a multiple of {num_replicas}")
    return Planner(
        workload,
        device,
        cluster,
        global_batch or 0,
        accumulate,
        prefetch,
        reshard_after_forward,
        headroom,
        software,
        beside,
    )


def _kept_as(
    precision: MixedPrecision, dtype: str, *, autocast: bool, master_weights: bool
) -> tuple[MixedPrecision, torch.dtype | None, torch.dtype | None]:
    """The engine's policy, the dtype of weights without a master, and what autocast casts to."""
    if autocast and not master_weights:
        raise UserError("autocast", "it computes beside fp32 weights", "leave out --no-master-weights, or it")
    if dtype == "float32" and (autocast or not master_weights):
        name = "autocast" if autocast else "master_weights"
        raise UserError(name, "float32 weights are their own masters", "choose dtype bfloat16 or float16")
    if autocast:
        return MixedPrecision(reduce_dtype=precision.reduce_dtype), None, DTYPES[dtype]
    if not master_weights:
        return MixedPrecision(reduce_dtype=precision.reduce_dtype), DTYPES[dtype], None
    return precision, None, None


def _require_expressible(workload: Workload, beside: PlanOnly, *, accumulates: bool) -> None:
    """Raise UserError where ``beside`` asks for what this workload cannot do."""
    if beside.optimizer_in_backward and accumulates:
        what = "gradients that are gone after a micro-batch cannot add up"
        raise UserError("optimizer_in_backward", what, "leave out global_batch, or it")
    if beside.num_ranks == 1:
        return
    if not workload.ours:
        name = next(name for name in beside.named if "parallel" in name).partition(" ")[0]
        raise UserError(name, f"a {workload.name} cannot be cut by name", "leave it out, or plan a preset")
    workload.check_part(beside.tensor_parallel, beside.context_parallel, beside.pipeline_parallel)


def _require_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(name, f"{value!r} is not a whole number of at least {least}", f"give {least} or more")


def _cluster(
    world_size: int, gpus_per_node: int, within_node: str | Link | None, network: str | Link, found: Calibration
) -> Cluster:
    """The links within a node: as given, else as measured, else as the GPU is sold, else those between nodes."""
    within = find_link(within_node, "within_node") if isinstance(within_node, str) else within_node
    within = within or found.link or (LINKS[found.device.link] if found.device.link else None)
    between = network if isinstance(network, Link) else find_link(network)
    return Cluster(world_size, gpus_per_node, within or between, between)


def _precision(dtype: str, reduce_dtype: str | None) -> MixedPrecision:
    for name, value in (("dtype", dtype), ("reduce_dtype", reduce_dtype)):
        if value is not None and value not in DTYPES:
            raise UserError(name, f"{value!r} is not a choice", f"choose one of {', '.join(DTYPES)}")
    return MixedPrecision(
        param_dtype=None if dtype == "float32" else DTYPES[dtype],
        reduce_dtype=None if reduce_dtype is None else DTYPES[reduce_dtype],
    )
