"""`Planner`: what all rows of a plan have in common, and any one row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import nn

from zeroshard.errors import UserError
from zeroshard.kernels import Choice
from zeroshard.lab.planner.plan_rows import Row, what_binds
from zeroshard.lab.predict.actions import Accumulate, Settings, Step
from zeroshard.lab.predict.hardware import LINKS, Calibration, Device, Link, find_device, find_link
from zeroshard.lab.predict.meetings import Meetings, meetings_of
from zeroshard.lab.predict.process_memory import Process, ProcessMemory, process_memory
from zeroshard.lab.predict.rates import Attention, Impl, Loss, Software, spread
from zeroshard.lab.predict.step import step_of
from zeroshard.lab.predict.timeline import Cluster, simulate
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

    def num_micro(self, micro_batch: int) -> int:
        """Micro-batches of a step; 0 where the global batch is no multiple of what one of them has."""
        if not self.global_batch:
            return 1
        at_once = micro_batch * self.cluster.world_size
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
        step = self.step(strategy, micro_batch, shards, alone=local_steps is not None)
        timing = simulate(step, self.device, self.cluster, software=self.software)
        meetings = Meetings()
        if local_steps is not None:
            meetings = meetings_of(self.workload.buffers(shards), local_steps, strategy, self.cluster, timing.step_s)
            timing = meetings.added_to(timing)
        process = self._process_memory(step, strategy, micro_batch, shards)
        needed = step.peak.total + process.total + meetings.held_bytes
        left = self.device.memory_bytes - needed
        fits = left >= self.headroom * self.device.memory_bytes
        tokens_per_s = step.tokens * world_size / timing.step_s if timing.step_s else 0.0
        peak = self.device.matmul_flops_per_s.get(self.workload.dtype)
        mfu = None if not peak else tokens_per_s * self.workload.num_flops_per_token / (world_size * peak)
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
            spread=spread(self.device),
            meetings=meetings,
        )

    def _process_memory(
        self, step: Step, strategy: ShardingStrategy, micro_batch: int, num_shards: int
    ) -> ProcessMemory:
        workload = self.workload
        config = getattr(workload.model, "config", None)
        what = Process(
            num_logits=micro_batch * workload.seq_len * getattr(config, "vocab_size", 0),
            group_sizes=(num_shards, self.cluster.world_size // num_shards),
            own_loss=workload.kernels != "reference",
            shards_grads=strategy.grads is SHARD and num_shards > 1,
            recomputes=getattr(config, "activation_checkpointing", "none") != "none",
            unread_bytes=workload.unread_bytes(micro_batch),
        )
        return process_memory(step, self.device, self.software, what)

    def step(self, strategy: ShardingStrategy, micro_batch: int, num_shards: int, *, alone: bool = False) -> Step:
        """The engine's step; ``alone``: of a replica that takes it without the others."""
        workload, on_cuda = self.workload, self.device.device_type == "cuda"
        state, whole_state = workload.states
        casts = any(workload.precision.compute_dtype(p.dtype) != p.dtype for p in workload.model.parameters())
        settings = Settings(
            strategy=strategy,
            precision=workload.precision,
            num_micro=max(self.num_micro(micro_batch), 1),
            accumulate=self.accumulate,
            prefetch=self.prefetch,
            num_replicas=1 if alone else self.cluster.world_size // num_shards,
            uniform_order=not on_cuda,
            device_type=self.device.device_type,
            fused_copies=on_cuda and casts and workload.optimizer == "AdamW" and workload.kernels != "reference",
        )
        trace = workload.trace(micro_batch, self.device.device_type)
        return step_of(trace, workload.buffers(num_shards), state, settings, whole_state)

    def on(self, **changes: Any) -> Planner:
        """The same with other settings of the cluster (``world_size``, ``within``, ``between``) or of its own."""
        own = {key: changes.pop(key) for key in list(changes) if key in ("workload", "device", "global_batch")}
        return replace(self, cluster=replace(self.cluster, **changes), **own)

    def smaller_groups(self) -> list[int]:
        """Shard sizes below the world: a node's ranks, and 4, 16, ... times as many, where they divide it."""
        found, size = [], self.cluster.ranks_per_node
        while size < self.cluster.world_size:
            if self.cluster.world_size % size == 0:
                found.append(size)
            size *= 4
        return found


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
    if impl == "eager" and kernels == "auto":
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
    )
    if workload.dtype in DTYPES and workload.dtype not in device.matmul_flops_per_s:
        served = ", ".join(device.matmul_flops_per_s)
        raise UserError("dtype", f"a {device.name} does not compute in {workload.dtype}", f"choose {served}")
    cluster = _cluster(world_size, gpus_per_node, within_node, network, found)
    if global_batch and global_batch % world_size:
        what = f"{global_batch} sequences cannot be shared out to {world_size} GPUs"
        raise UserError("global_batch", what, f"give a multiple of {world_size}")
    return Planner(
        workload, device, cluster, global_batch or 0, accumulate, prefetch, reshard_after_forward, headroom, software
    )


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
