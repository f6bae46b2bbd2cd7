"""Data types of a plan: rows, each one way to run with its predictions, and the recommended row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal

from zeroshard.lab.planner.price import Cost
from zeroshard.lab.predict.actions import Step
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import Device, Link
from zeroshard.lab.predict.outer_steps import OuterStepCost
from zeroshard.lab.predict.process_memory import ProcessMemory
from zeroshard.lab.predict.rates import Impl, Software
from zeroshard.lab.predict.timeline import Timing
from zeroshard.lab.predict.traffic import OnLink, bytes_by_op
from zeroshard.lab.predict.workload import Workload
from zeroshard.zero import ShardingStrategy

HOST_BINDS = 0.95  # share of a step's time from which on the host that issues its operations is the bottleneck
DAY_S = 86_400
Binds = Literal[
    "memory",
    "host memory",
    "communication",
    "matrix products",
    "memory bandwidth",
    "kernel launches",
    "quantising",
    "host updates",
]


@dataclass(frozen=True)
class Offloaded:
    """State off the device in a row; all zeros if there is none.

    Attributes:
        fraction: share of a rank's elements whose state leaves.
        host_bytes: of a rank, in memory of its host.
        pinned_bytes: page-locked bytes of a rank, on a GPU: copies on their way, and gradients that wait there.
        ranks_per_node: ranks that share a host.
        waiting_s: seconds of a step in which it waits for updates by the host and copies over the bus.
        measured: whether the rates of both were measured.
        file_bytes: of a rank's file, read once and written once for each step.
        has_disk_rates: whether the disk was measured; if not, ``waiting_s`` has no time of it.
    """

    fraction: float = 0.0
    host_bytes: int = 0
    pinned_bytes: int = 0
    ranks_per_node: int = 1
    waiting_s: float = 0.0
    measured: bool = False
    file_bytes: int = 0
    has_disk_rates: bool = False

    def as_dict(self) -> dict[str, Any]:
        """For JSON: with the bytes of a node."""
        on_node = {"node_host_bytes": self.host_bytes * self.ranks_per_node}
        return asdict(self) | on_node | {"node_file_bytes": self.file_bytes * self.ranks_per_node}

    def written_bytes_per_day(self, step_s: float) -> float:
        """Bytes that the ranks of a node write to their files in a day of steps of ``step_s`` seconds."""
        return self.file_bytes * self.ranks_per_node * DAY_S / step_s if step_s else 0.0


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What one way to run needs of memory.

    Attributes:
        strategy: the row of the stage table.
        shard_size: number of ranks that shard together: the world size, or that of each replica.
        step: the step's actions, collectives and memory.
        outer_steps: the cost of the outer steps of local steps.
        node_size: ranks of a node that sum gradients before these are sent in a wire format; 0: none do.
        process: the process's other memory, such as CUDA's context, NCCL's buffers and the allocator's fragments.
        needed_bytes: peak memory of the process, all of the above included.
        host_input_bytes: of a rank's host, in which inputs of recomputed blocks wait for backward.
        node_host_bytes: of a node's host, for what leaves its devices; of CPUs that have such, for all.
        fits_device: whether enough memory of the device stays free.
        lacks_host: whether a node's host lacks what its ranks keep there, as far as is known.
    """

    strategy: ShardingStrategy
    shard_size: int
    step: Step = field(repr=False)
    outer_steps: OuterStepCost
    node_size: int
    process: ProcessMemory
    needed_bytes: int
    host_input_bytes: int
    node_host_bytes: int
    fits_device: bool
    lacks_host: bool

    @property
    def fits(self) -> bool:
        """Whether both device and host have enough, as far as is known."""
        return self.fits_device and not self.lacks_host

    @property
    def node_copy(self) -> int:
        """Ranks of a node that share a second copy of the weights; 0: there is none."""
        return self.strategy.secondary_shard_size or 0


@dataclass(frozen=True, kw_only=True)
class Row(Needs):
    """One way to run, and the predictions for it.

    Attributes:
        stage: the ZeRO stage, a key of `STAGES`; None for the user's own row of the stage table.
        micro_batch, num_micro: rows of a micro-batch, and micro-batches of a rank's step.
        headroom_bytes: the device's memory minus ``needed_bytes``; negative if the row does not fit.
        timing: the times of a step, with its share of an outer step.
        tokens_per_s: tokens per second of all ranks together.
        mfu: model FLOPs as a share of the device's data-sheet peak for this dtype; None if that is not known.
        binds: the bottleneck: what to change first to be faster, or to fit.
        spread: 10th and 90th percentile of predicted over published tokens/s, on runs that nothing was fitted to.
        padding: size of the padded flat buffers relative to the parameters in them.
        by_link: the step's collectives by operation, number of ranks and link.
        offloaded: the state that is off the device.
        any_stage: whether the row is the same at all stages.
    """

    stage: int | None
    micro_batch: int
    num_micro: int
    headroom_bytes: int
    timing: Timing = field(repr=False)
    tokens_per_s: float
    mfu: float | None
    binds: Binds
    spread: tuple[float, float]
    padding: float
    by_link: tuple[OnLink, ...] = field(repr=False)
    offloaded: Offloaded
    any_stage: bool

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """The range in which four of five runs that nothing was fitted to would lie; a point if rates were measured."""
        return (self.tokens_per_s / self.spread[1], self.tokens_per_s / self.spread[0])

    def _off_the_device(self) -> dict[str, Any]:
        off = self.offloaded
        return off.as_dict() | {"node_written_bytes_per_day": off.written_bytes_per_day(self.timing.step_s)}

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for JSON."""
        return {
            "stage": self.stage,
            "shard_size": self.shard_size,
            "node_copy": self.node_copy,
            "node_size": self.node_size,
            "micro_batch": self.micro_batch,
            "grad_accum_steps": self.num_micro,
            "fits": self.fits,
            "needed_bytes": self.needed_bytes,
            "headroom_bytes": self.headroom_bytes,
            "peak_bytes": {**self.step.peak.by_category, **self.process.as_dict()},
            "peak_at": self.step.peak.where,
            "resident_bytes": {
                "after_initialisation": self.step.start,
                "before_update": self.step.before_update,
                "after_update": self.step.after_update,
            },
            "messages": {
                "count": sum(each.count for each in self.by_link),
                "bytes_by_op": bytes_by_op(self.by_link),
                "by_link": [asdict(each) for each in self.by_link],
            },
            **({"offload": self._off_the_device()} if self.offloaded.fraction else {}),
            **({"host_input_bytes": self.host_input_bytes} if self.host_input_bytes else {}),
            **({"node_host_bytes": self.node_host_bytes} if self.node_host_bytes else {}),
            **({"outer_steps": asdict(self.outer_steps)} if self.outer_steps.every > 1 else {}),
            "step_s": self.timing.step_s,
            "compute_s": self.timing.compute_s,
            "comm_s": self.timing.comm_s,
            "exposed_s": self.timing.exposed_s,
            "quantise_s": self.timing.wire_s,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_range": self.tokens_per_s_range,
            "mfu": self.mfu,
            "binds": self.binds,
        }


@dataclass(frozen=True)
class Plan:
    """The request, every row, and the recommendation.

    Attributes:
        workload: the training job.
        device, cluster: the hardware it was planned for.
        rows: sharding over all ranks first, stage by stage; then, with several nodes, sharding over fewer ranks.
        best: the recommended row, of the lowest stage that fits with room (`zeroshard.lab.planner.advice`); None if no
            row fits.
        advise: makes `advice`.
        software: the kernels that compute.
        compiled: what of the model is compiled: in one graph, in pieces, or nothing.
        host_memory_bytes: of a node's host; None: not known.
    """

    workload: Workload = field(repr=False)
    device: Device
    cluster: Cluster
    rows: tuple[Row, ...]
    best: Row | None
    advise: Callable[[], str] = field(repr=False, compare=False)
    software: Software = field(default_factory=Software)
    compiled: Literal["", "compiled", "in pieces"] = ""
    host_memory_bytes: int | None = None

    @cached_property
    def advice(self) -> str:
        """The recommended row and the reason, or the changes that would make a row fit, each of which is planned."""
        return self.advise()

    @property
    def num_gpus(self) -> int:
        """Number of all GPUs."""
        return self.cluster.world_size

    @property
    def dtype(self) -> str:
        """Name of the requested dtype."""
        return self.workload.dtype

    @property
    def impl(self) -> Impl:
        """How the device computes; what is known of fused and of compiled code is of GPUs."""
        return self.software.impl if self.device.device_type == "cuda" else "eager"

    def cost(self, num_tokens: int = 0, dollars_per_h: float = 0.0) -> Cost | None:
        """Cost of training on ``num_tokens`` with the recommended row, at a price per GPU; None if no row fits."""
        if self.best is None:
            return None
        return Cost(self.num_gpus, self.best.tokens_per_s, num_tokens, dollars_per_h)

    @property
    def fits(self) -> bool:
        """Whether any row fits."""
        return self.best is not None

    def _coded(self) -> dict[str, Any]:
        form, (numel, num_bytes) = self.workload.frozen_format, self.workload.codes
        return (
            {"base": {"format": form.name, "double": form.double, "num_params": numel, "num_bytes": num_bytes}}
            if form
            else {}
        )

    def as_dict(self) -> dict[str, Any]:
        """The plan as a dict, for JSON."""
        return {
            "model": self.workload.name,
            "num_params": self.workload.num_params,
            "num_trained_params": self.workload.num_trained_params,
            **self._coded(),
            "dtype": self.dtype,
            "optimizer": self.workload.optimizer,
            "impl": self.impl,
            "attention": self.software.attention,
            "seq_len": self.workload.seq_len,
            "sequence_parallel": self.workload.sequence_parallel,
            "gpus": self.num_gpus,
            "gpus_per_node": self.cluster.ranks_per_node,
            "gpu": {"name": self.device.name, "memory_bytes": self.device.memory_bytes, "source": self.device.source},
            "host_memory_bytes": self.host_memory_bytes,
            "within_node": _link_dict(self.cluster.within),
            "between_nodes": _link_dict(self.cluster.between),
            "rows": [row.as_dict() for row in self.rows],
            "best": None if self.best is None else self.rows.index(self.best),
            "advice": self.advice,
        }


def _link_dict(link: Link) -> dict[str, Any]:
    return {
        "name": link.name,
        "latency_s": link.latency_s,
        "bytes_per_s": link.bytes_per_s,
        "share": link.share,
        "source": link.source,
    }


def bottleneck(timing: Timing, *, fits: bool) -> Binds:
    """The bottleneck of a row: memory if it does not fit, otherwise what takes the largest part of a step's time.

    A host that needs as long as the step is the bottleneck, whatever the device does meanwhile.
    """
    if not fits:
        return "memory"
    if timing.issue_s >= HOST_BINDS * timing.step_s > 0:
        return "kernel launches"
    limits: dict[Binds, float] = {
        "communication": timing.exposed_s,
        "matrix products": timing.bound_s.get("flops", 0.0),
        "memory bandwidth": timing.bound_s.get("bytes", 0.0),
        "kernel launches": timing.bound_s.get("kernels", 0.0),
        "quantising": timing.wire_s,
        "host updates": timing.host_s,
    }
    return max(limits, key=lambda key: limits[key])
