"""`Planner`: holds everything that the rows of a plan have in common, and plans any single row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from zeroshard.lab.planner.plan_rows import Needs, Offloaded, Row, bottleneck
from zeroshard.lab.planner.request import HEADROOM, Request
from zeroshard.lab.predict.actions import Compute, Settings, Step
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import Device
from zeroshard.lab.predict.memory import file_parts, host_bytes, resident_bytes
from zeroshard.lab.predict.model_spans import Trace
from zeroshard.lab.predict.offload import (
    UnitTimes,
    hidden_units,
    host_rates,
    least_away,
    pinned_bytes,
    share_of,
    unit_times,
    waiting_s,
    why_all,
)
from zeroshard.lab.predict.outer_steps import OuterStepCost, outer_step_cost
from zeroshard.lab.predict.process_memory import Process, ProcessMemory, process_memory
from zeroshard.lab.predict.rates import Software, spread
from zeroshard.lab.predict.step import step_of
from zeroshard.lab.predict.timeline import simulate
from zeroshard.lab.predict.traffic import bytes_by_link
from zeroshard.lab.predict.work import work_of_plain_loss
from zeroshard.lab.predict.workload import Workload
from zeroshard.zero import STAGES, LocalSteps, Offload, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD

__all__ = ["HEADROOM", "Planner", "padding_of", "planner_for"]


@dataclass
class Planner:
    """Everything that all rows have in common; the inverse questions also plan their rows with it.

    Attributes:
        workload: the training job.
        device: the device of each rank.
        cluster: the ranks, one for each GPU, and their links.
        asked: the request, of which these were made. At stages that keep weights unsharded, weights do not leave the
            device. If the fraction of ``offload`` is ``auto``, a row has that which nothing waits for, or more if it
            does not fit otherwise.
        software: the kernels that compute.
    """

    workload: Workload
    device: Device
    cluster: Cluster
    asked: Request = field(default_factory=Request)
    software: Software = field(default_factory=Software)

    @property
    def stages_differ(self) -> bool:
        """Whether they do: one rank shards nothing, unless its weights come from the host or a file at stage 3."""
        offload = self.asked.offload
        return self.cluster.world_size > 1 or (offload is not None and offload.weights != "device")

    def num_micro(self, micro_batch: int) -> int:
        """Micro-batches of a step; 0 if this micro-batch size does not divide the global batch."""
        asked, num_gpus = self.asked, self.cluster.world_size
        least = asked.reproducible // num_gpus if asked.reproducible else 1  # the fewest; others are multiples
        if not asked.global_batch:
            return least
        at_once = micro_batch * self.workload.groups(self.cluster.world_size)[0]
        return asked.global_batch // at_once if asked.global_batch % (at_once * least) == 0 else 0

    def row(
        self,
        stage: int | ShardingStrategy,
        micro_batch: int,
        shard_size: int | None = None,
        local_steps: LocalSteps | None = None,
    ) -> Row:
        """Plan one way to run; ``shard_size`` None: all ranks; ``local_steps`` None: replicas reduce at each step."""
        plan = self._settled(stage, micro_batch, shard_size)
        needs = plan.needs(stage, micro_batch, shard_size, local_steps)
        return plan._timed(needs, stage, micro_batch, local_steps)

    def fits(
        self,
        stage: int | ShardingStrategy,
        micro_batch: int,
        shard_size: int | None = None,
        local_steps: LocalSteps | None = None,
    ) -> bool:
        """Whether that row fits, without its time: of most that do not, `held_bytes` or `least_bytes` are too many."""
        if not self.num_micro(micro_batch) or not self.leaves_room(self.held_bytes(stage, micro_batch, shard_size)):
            return False
        if not self.leaves_room(self.least_bytes(stage, micro_batch, shard_size)):
            return False
        all_away = self._with_all_away()
        if all_away.needs(stage, micro_batch, shard_size, local_steps).fits:
            return True
        plan = self if all_away is self else self._settled(stage, micro_batch, shard_size)
        return plan is not self and plan.needs(stage, micro_batch, shard_size, local_steps).fits

    def held_bytes(self, stage: int | ShardingStrategy, micro_batch: int, shard_size: int | None = None) -> int:
        """Bytes of the row's weights and states that stay on the device, or of as few as may, without a trace."""
        shards = shard_size or self.cluster.world_size
        strategy = self.strategy(stage, shards)
        settings = self._with_all_away()._settings(strategy, micro_batch, shards)
        key = replace(settings, num_micro=1), shards, shards < self.cluster.world_size
        known = self.workload.held
        if key not in known:
            held = resident_bytes(self._buffers(shards), settings, *self.workload.states)
            known[key] = held["params"] + held["master"] + held["optimizer"]
        return known[key]

    def least_bytes(self, stage: int | ShardingStrategy, micro_batch: int, shard_size: int | None = None) -> int:
        """Bytes that the row needs at least: the peak of the trace, beside what is held.

        The engine only adds to them, for unsharded weights and gradients.
        """
        trace = self._trace(micro_batch)
        return self.held_bytes(stage, micro_batch, shard_size) + trace.input_bytes + trace.peak_bytes

    def left_bytes(self, num_bytes: int) -> float:
        """Bytes of the device that are left beside so many, and beside those that must stay free."""
        return self.device.memory_bytes - num_bytes - self.asked.headroom * self.device.memory_bytes

    def leaves_room(self, num_bytes: int) -> bool:
        """Whether beside so many bytes of the device as much is free as must stay free."""
        return self.left_bytes(num_bytes) >= 0

    def needs(
        self,
        stage: int | ShardingStrategy,
        micro_batch: int,
        shard_size: int | None = None,
        local_steps: LocalSteps | None = None,
    ) -> Needs:
        """The memory of one way to run, of which a part of the state has left as `Offload.fraction` says."""
        world_size = self.cluster.world_size
        shards = shard_size or world_size
        strategy = self.strategy(stage, shards)
        step = self.step(strategy, micro_batch, shards, alone=local_steps is not None)
        outer_steps = OuterStepCost()
        if local_steps is not None:
            buffers = self._buffers(shards)
            outer_steps = outer_step_cost(buffers, local_steps, strategy, self.cluster, self.device)
        node_size = self._settings(strategy, micro_batch, shards).nodes_of(shards) or 0
        process = self._process_memory(step, strategy, micro_batch, shards, node_size)
        needed = step.peak.total + process.total + outer_steps.outer_bytes
        host_input_bytes = self.workload.host_input_bytes(micro_batch)
        on_host = host_input_bytes + (0 if self.asked.offload is None else host_bytes(step.before_update))
        if on_host and self.device.device_type == "cpu":  # whose memory is that of the host
            on_host = needed
        node_bytes = on_host * min(self.cluster.ranks_per_node, world_size)
        return Needs(
            strategy=strategy,
            shard_size=shards,
            step=step,
            outer_steps=outer_steps,
            node_size=node_size,
            process=process,
            needed_bytes=needed,
            host_input_bytes=host_input_bytes,
            node_host_bytes=node_bytes,
            fits_device=self.leaves_room(needed),
            lacks_host=self.asked.host_memory_bytes is not None and node_bytes > self.asked.host_memory_bytes,
        )

    def _timed(
        self, needs: Needs, stage: int | ShardingStrategy, micro_batch: int, local_steps: LocalSteps | None
    ) -> Row:
        """The row of a way to run with these needs."""
        world_size, step, shards = self.cluster.world_size, needs.step, needs.shard_size
        buffers = self._buffers(shards)
        timing = simulate(step, self.device, self.cluster, software=self.software)
        if local_steps is not None:
            timing = needs.outer_steps.added_to(timing)
        offloaded = self._offloaded(self._settings(needs.strategy, micro_batch, shards), buffers, step, micro_batch)
        timing = replace(timing, step_s=timing.step_s + offloaded.waiting_s, host_s=offloaded.waiting_s)
        tokens_per_s = step.tokens * world_size / timing.step_s if timing.step_s else 0.0
        peak = self.device.matmul_flops_per_s.get(self.workload.dtype)
        mfu = None if not peak else tokens_per_s * self.workload.num_flops_per_token / (world_size * peak)
        only_host = needs.fits_device and needs.lacks_host
        return Row(
            **vars(needs),
            stage=stage if isinstance(stage, int) else None,
            micro_batch=micro_batch,
            num_micro=max(self.num_micro(micro_batch), 1),
            headroom_bytes=self.device.memory_bytes - needs.needed_bytes,
            timing=timing,
            tokens_per_s=tokens_per_s,
            mfu=mfu,
            binds="host memory" if only_host else bottleneck(timing, fits=needs.fits_device),
            spread=spread(self.device),
            padding=padding_of(buffers),
            by_link=bytes_by_link(step, self.cluster),
            offloaded=offloaded,
            any_stage=not self.stages_differ,
        )

    def _settled(self, stage: int | ShardingStrategy, micro_batch: int, shard_size: int | None) -> Planner:
        """With a fraction of the state off the device where it was ``auto``: the most units that nothing waits for.

        More of them leave if that does not fit.
        """
        offload = self.asked.offload
        if offload is None or offload.fraction != "auto":
            return self
        if why_all(offload, host_rates(self.device, 1), self.device.device_type):
            return self
        shards = shard_size or self.cluster.world_size
        buffers = self._buffers(shards)
        settings = self._settings(self.strategy(stage, shards), micro_batch, shards)
        times = self._unit_times(settings, buffers, micro_batch)

        def with_away(num_away: int) -> Planner:
            return self.on(offload=replace(offload, fraction=share_of(buffers, num_away)))

        def left(num_away: int) -> float:
            plan = with_away(num_away)
            least = self.left_bytes(plan.least_bytes(stage, micro_batch, shard_size))
            return least if least < 0 else self.left_bytes(plan.needs(stage, micro_batch, shard_size).needed_bytes)

        hidden, num_units = hidden_units(list(times.values())), len({buffer.unit for buffer in buffers})
        return with_away(least_away(hidden, num_units, left))

    def _buffers(self, num_shards: int) -> list[Buffer]:
        replicated = num_shards < self.cluster.world_size
        return self.workload.buffers(num_shards, replicated=replicated, reproducible=self.asked.reproducible)

    def _with_all_away(self) -> Planner:
        """With all of the state off the device where the fraction was ``auto``."""
        offload = self.asked.offload
        if offload is None or offload.fraction != "auto":
            return self
        return self.on(offload=replace(offload, fraction=1.0))

    def _unit_times(self, settings: Settings, buffers: Sequence[Buffer], micro_batch: int) -> dict[str, UnitTimes]:
        ranks_per_node = min(self.cluster.ranks_per_node, self.cluster.world_size)
        rates = host_rates(self.device, ranks_per_node)
        trace = self._trace(micro_batch)
        state, _ = self.workload.states
        return unit_times(trace, buffers, state, settings, self.device, rates, self.software.attention)

    def _offloaded(self, settings: Settings, buffers: Sequence[Buffer], step: Step, micro_batch: int) -> Offloaded:
        offload = settings.offload
        if offload is None:
            return Offloaded()
        times = self._unit_times(settings, buffers, micro_batch)
        trace = self._trace(micro_batch)
        rates = host_rates(self.device, 1)
        return Offloaded(
            offload.fraction if offload.fraction != "auto" else 1.0,
            host_bytes(step.before_update),
            pinned_bytes(buffers, settings),
            min(self.cluster.ranks_per_node, self.cluster.world_size),
            waiting_s(times, buffers, settings, trace, self.device, rates),
            measured=rates.measured,
            has_disk_rates=self.device.disk_walk_bytes_per_s > 0,
            file_bytes=sum(file_parts(buffers, settings, *self.workload.states)),
        )

    def strategy(self, stage: int | ShardingStrategy, num_shards: int) -> ShardingStrategy:
        """The row of the stage table for ``num_shards`` ranks that shard together.

        It has no second copy if these ranks do not divide into several groups of the copy's size, for example because
        they are the ranks of one node.
        """
        row = stage if isinstance(stage, ShardingStrategy) else STAGES[stage]
        copied = row.secondary_shard_size or (self.asked.node_copy if row.params is SHARD else 0)
        reshards = row.reshard_after_forward and self.asked.reshard_after_forward
        if not reshards or copied not in copy_sizes(num_shards, self.cluster):
            copied = 0
        return replace(row, reshard_after_forward=reshards, secondary_shard_size=copied or None)

    def _process_memory(
        self, step: Step, strategy: ShardingStrategy, micro_batch: int, num_shards: int, node_size: int
    ) -> ProcessMemory:
        workload = self.workload
        what = Process(
            num_logits=micro_batch * workload.tokens_of_rank * workload.vocab_size,
            group_sizes=(
                num_shards,
                self.cluster.world_size // num_shards,
                *{strategy.secondary_shard_size or 0, node_size},
                num_shards // node_size if node_size else 0,
                workload.sequence_parallel,
            ),
            world_size=self.cluster.world_size,
            own_loss=workload.kernels != "reference",
            shards_grads=strategy.grads is SHARD and num_shards > 1,
            unread_bytes=workload.unread_bytes(micro_batch),
            backend=self.cluster.within.backend,
        )
        return process_memory(step, self.device, self.software, what)

    def step(self, strategy: ShardingStrategy, micro_batch: int, num_shards: int, *, alone: bool = False) -> Step:
        """The engine's step; ``alone``: whether the replica takes it as a local step, without the other replicas."""
        workload = self.workload
        settings = self._settings(strategy, micro_batch, num_shards, alone=alone)
        key = settings, micro_batch, num_shards, self.compiled, num_shards < self.cluster.world_size
        if key not in workload.steps:
            buffers = self._buffers(num_shards)
            workload.steps[key] = step_of(self._trace(micro_batch), buffers, settings, *workload.states)
        step = workload.steps[key]
        if self.software.loss == "plain" and self.device.is_measured_gpu and workload.kernels != "reference":
            step = _with_plain_loss(step, micro_batch * workload.tokens_of_rank * workload.vocab_size, workload.dtype)
        return step

    def _trace(self, micro_batch: int) -> Trace:
        how: dict[str, Any] = {"compiled": self.compiled, "deterministic": bool(self.asked.reproducible)}
        return self.workload.trace(micro_batch, self.device.device_type, **how)

    @property
    def compiled(self) -> Literal["", "compiled", "in pieces"]:
        """What torch.compile makes of the model: one graph, on one rank whose state and inputs stay on the device."""
        if self.software.impl != "compile" or self.device.device_type != "cuda":
            return ""
        leaves = self.asked.offload is not None or self.workload.described.recomputation == "offload"
        several = self.cluster.world_size > 1 or self.asked.reproducible or self.software.loss is not None
        return "in pieces" if several or leaves else "compiled"

    def _settings(
        self, strategy: ShardingStrategy, micro_batch: int, num_shards: int, *, alone: bool = False
    ) -> Settings:
        workload, on_cuda = self.workload, self.device.device_type == "cuda"
        over_nodes = num_shards == self.cluster.world_size  # replicas already sum within a node
        asked: dict[str, Any] = self.asked.choices | {"offload": self.offload_at(strategy, num_shards)}
        return Settings(
            strategy=strategy,
            precision=workload.precision if over_nodes else replace(workload.precision, node_size=None),
            num_micro=max(self.num_micro(micro_batch), 1),
            num_replicas=1 if alone else self.cluster.world_size // num_shards,
            uniform_order=not on_cuda,
            device_type=self.device.device_type,
            **asked,
        )

    def offload_at(self, strategy: ShardingStrategy, num_shards: int) -> Offload | None:
        """What leaves the device at a stage: weights only where each rank has its own shard, or there is one rank."""
        offload, shards = self.asked.offload, num_shards > 1 or self.cluster.world_size == 1
        return (
            offload if offload is None or (strategy.params is SHARD and shards) else replace(offload, weights="device")
        )

    def on(self, **changes: Any) -> Planner:
        """A copy with other settings of the cluster (``world_size``, ``within``, ``between``), of the request, or with
        another ``workload``, ``device`` or ``software``.
        """
        ours, of_cluster = vars(self), vars(self.cluster)
        own = {name: value for name, value in changes.items() if name in ours}
        cluster = {name: value for name, value in changes.items() if name in of_cluster}
        asked = {name: value for name, value in changes.items() if name not in ours and name not in of_cluster}
        own |= {"cluster": replace(self.cluster, **cluster)} if cluster else {}
        own |= {"asked": replace(self.asked, **asked)} if asked else {}
        return replace(self, **own)

    def smaller_groups(self) -> list[int]:
        """Shard sizes below the world size to plan: a node's ranks, and 4, 16, ... times as many, if they divide it."""
        found, size = [], self.cluster.ranks_per_node
        while not self.asked.reproducible and size < self.cluster.world_size:
            if size > 1 and self.cluster.world_size % size == 0:
                found.append(size)
            size *= 4
        return found


def _with_plain_loss(step: Step, num_logits: int, dtype: str) -> Step:
    """The step with torch's operations for a loss that is traced by chunks; rates of data sheets are fitted without."""
    more = Compute((work_of_plain_loss(num_logits, getattr(torch, dtype).itemsize),))
    parts = {name: [more, *getattr(step, name)] for name in ("first", "middle", "last") if getattr(step, name)}
    return replace(step, **parts)


def copy_sizes(num_shards: int, cluster: Cluster) -> list[int]:
    """Possible numbers of ranks in a node that share a second copy of weights, if ``num_shards`` ranks shard them."""
    per_node = cluster.ranks_per_node if cluster.world_size > cluster.ranks_per_node else num_shards
    return [size for size in range(2, min(num_shards, per_node + 1)) if num_shards % size == 0 == per_node % size]


def padding_of(buffers: Sequence[Buffer]) -> float:
    """Size of the padded buffers relative to the parameters in them; 1.0 without padding."""
    numel = sum(buffer.layout.numel for buffer in buffers)
    return sum(buffer.layout.padded_numel for buffer in buffers) / max(numel, 1)


def planner_for(model: str | nn.Module, **given: Any) -> Planner:
    """Make a `Planner` for ``model`` and the fields of `Request` in ``given``; errors are those of `plan`."""
    asked = Request(**given)
    by_default: dict[str, Any] = {}
    if isinstance(model, str) and asked.as_a_run:
        by_default = {"by_default": True, "left_uncompiled_with": asked.left_uncompiled_with}
        asked = replace(asked, impl=None if asked.left_uncompiled_with else "compile")
    asked = replace(asked, gpu=asked.calibration)  # read once
    found, workload = asked.calibration, asked.workload(model)
    asked.check(workload, found.device)
    software = replace(asked.software_of(workload.model), **by_default)
    return Planner(workload, found.device, asked.cluster(found), asked, software)
