"""What a plan says: rows, each one way to run and what it comes to, and which of them to take."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from zeroshard.lab.planner.price import Cost
from zeroshard.lab.predict.actions import Step
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import Device, Link
from zeroshard.lab.predict.meetings import Meetings
from zeroshard.lab.predict.memory import QUANTISED
from zeroshard.lab.predict.plan_only import PlanOnly
from zeroshard.lab.predict.process_memory import ProcessMemory
from zeroshard.lab.predict.rates import Software
from zeroshard.lab.predict.timeline import Timing
from zeroshard.lab.predict.traffic import OnLink, bytes_of_step, num_messages
from zeroshard.lab.predict.workload import Workload

Binds = Literal["memory", "communication", "matrix products", "memory bandwidth", "kernel launches", "quantising"]


@dataclass(frozen=True)
class Row:
    """One way to run, and what it comes to.

    Attributes:
        stage: of `STAGES`; None for a row of the user's own.
        shard_size: ranks that shard together: the world, or a part of it that is replicated.
        micro_batch, num_micro: rows of a micro-batch, and how many of these a rank's step has.
        step: its actions, messages and memory.
        comm_bytes: memory of the communication library.
        process: what the process holds beside: CUDA's context, the allocator's fragments.
        needed_bytes: at the fullest moment, these with it.
        headroom_bytes: what the device has beyond that; negative: what it lacks.
        fits: whether that is enough.
        timing: of a step.
        tokens_per_s: over all ranks.
        mfu: of the device's data-sheet peak for this dtype; None where it is not known.
        binds: what to change first to be faster, or to fit.
        meetings: of replicas that take local steps; ``timing`` has their share of each step in it.
        padding: how many times as large flat buffers are as the parameters in them.
        node_copy: ranks of a node that keep a second copy of the weights; 0: there is none.
        node_size: ranks of a node in which gradients are added up before they travel in a wire format; 0: none do.
        by_link: what is sent, by operation, ranks and link.
        spread: predicted / published tokens/s on the runs that nothing was fitted to, the 10th and 90th of a hundred.
    """

    stage: int | None
    shard_size: int
    micro_batch: int
    num_micro: int
    step: Step = field(repr=False)
    comm_bytes: int
    process: ProcessMemory
    needed_bytes: int
    headroom_bytes: int
    fits: bool
    timing: Timing = field(repr=False)
    tokens_per_s: float
    mfu: float | None
    binds: Binds
    spread: tuple[float, float] = (1.0, 1.0)
    padding: float = 1.0
    meetings: Meetings = field(default_factory=Meetings)
    node_copy: int = 0
    node_size: int = 0
    by_link: tuple[OnLink, ...] = field(default=(), repr=False)

    @property
    def tokens_per_s_range(self) -> tuple[float, float]:
        """Between which four of five runs that nothing was fitted to would lie; one point where rates were measured."""
        return (self.tokens_per_s / self.spread[1], self.tokens_per_s / self.spread[0])

    @property
    def messages_bytes(self) -> dict[str, int]:
        """Bytes of a rank's step by operation."""
        return bytes_of_step(self.step)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
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
            "peak_bytes": {**self.step.peak.by_category, "comm_buffers": self.comm_bytes, **self.process.as_dict()},
            "peak_at": self.step.peak.where,
            "resident_bytes": {
                "after_initialisation": self.step.start,
                "before_update": self.step.before_update,
                "after_update": self.step.after_update,
            },
            "messages": {
                "count": num_messages(self.step),
                "bytes_by_op": bytes_of_step(self.step),
                "by_link": [asdict(each) for each in self.by_link],
            },
            **({"meetings": self.meetings.as_dict()} if self.meetings.every > 1 else {}),
            "step_s": self.timing.step_s,
            "compute_s": self.timing.compute_s,
            "comm_s": self.timing.comm_s,
            "exposed_s": self.timing.exposed_s,
            "quantise_s": self.timing.wire_s,
            "host_bytes": self.step.host_bytes,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_range": self.tokens_per_s_range,
            "mfu": self.mfu,
            "binds": self.binds,
        }


@dataclass(frozen=True)
class Plan:
    """What was asked, every row, and what to do.

    Attributes:
        workload: what is trained.
        device, cluster: on what.
        rows: flat sharding first, stage by stage; then, in a world of several nodes, sharding over fewer ranks.
        best: the row to take, of the lowest stage that fits with room (`zeroshard.lab.planner.advice`); None where none
            fits.
        advice: the row to take and why, or the nearest change that would make one fit.
        beside: what was planned that zeroshard does not do.
        software: who computes.
        gpus_per_node: GPUs of a full node; 0: as many as ``cluster`` has ranks in one.
    """

    workload: Workload = field(repr=False)
    device: Device
    cluster: Cluster
    rows: tuple[Row, ...]
    best: Row | None
    advice: str
    beside: PlanOnly = field(default_factory=PlanOnly)
    software: Software = field(default_factory=Software)
    gpus_per_node: int = 0

    @property
    def num_gpus(self) -> int:
        """All of them; ``cluster`` counts those of a tensor and of a pipeline as one."""
        return self.cluster.world_size * self.beside.tensor_parallel * self.beside.pipeline_parallel

    @property
    def gpus_in_node(self) -> int:
        """Of a full node."""
        return self.gpus_per_node or self.cluster.ranks_per_node

    @property
    def dtype(self) -> str:
        """As it was asked for."""
        return "fp8" if self.beside.fp8 else self.workload.dtype

    @property
    def plan_only(self) -> tuple[str, ...]:
        """What of it zeroshard does not do: an estimate to compare with."""
        device = [self.device.name] if self.device.device_type == "tpu" else []
        return (
            *device,
            *self.beside.named,
            *([self.workload.optimizer] if self.workload.optimizer in QUANTISED else []),
        )

    def cost(self, num_tokens: int = 0, dollars_per_h: float = 0.0) -> Cost | None:
        """Of ``num_tokens`` by the row to take, at a price of one GPU; None where nothing fits."""
        if self.best is None:
            return None
        return Cost(self.num_gpus, self.best.tokens_per_s, num_tokens, dollars_per_h)

    @property
    def fits(self) -> bool:
        """Whether any row does."""
        return self.best is not None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.workload.name,
            "num_params": self.workload.num_params,
            "num_trained_params": self.workload.num_trained_params,
            "dtype": self.dtype,
            "optimizer": self.workload.optimizer,
            "seq_len": self.workload.seq_len,
            "gpus": self.num_gpus,
            "gpus_per_node": self.gpus_in_node,
            "gpu": {"name": self.device.name, "memory_bytes": self.device.memory_bytes, "source": self.device.source},
            "within_node": _link_dict(self.cluster.within),
            "between_nodes": _link_dict(self.cluster.between),
            "fabric": asdict(self.cluster.fabric),
            "rows": [row.as_dict() for row in self.rows],
            "best": None if self.best is None else self.rows.index(self.best),
            "advice": self.advice,
            "plan_only": list(self.plan_only),
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
    """What limits a row: memory where it does not fit, else what takes most of a step's time."""
    if not fits:
        return "memory"
    limits: dict[Binds, float] = {
        "communication": timing.exposed_s,
        "matrix products": timing.bound_s.get("flops", 0.0),
        "memory bandwidth": timing.bound_s.get("bytes", 0.0),
        "kernel launches": timing.bound_s.get("kernels", 0.0),
        "quantising": timing.wire_s,
    }
    return max(limits, key=lambda key: limits[key])
