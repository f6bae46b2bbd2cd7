"""Estimates of techniques that plans support but zeroshard's trainer does not: offloading, tensor, context and pipeline
parallelism. Also fp8, which the trainer has.

Each estimate applies a formula from the literature to a step that is otherwise planned exactly:

    fp8          matrix products inside blocks take `FP8_TIME` of their time: torchao's float8 with tensorwise scales
                 trains Llama 3 8B on 8 H100 1.25 times as fast (docs.pytorch.org/ao, "Quantized Training").
                 Activations, weights and collectives stay in 16 bits. `zeroshard train --dtype fp8` does this.
    offload      master weights, optimizer states and gradients are in host memory. Gradients are copied there as they
                 are reduced, the host updates, and weights are copied back: max(n / u, 2 copies over PCIe), with u =
                 `HOST_ADAM_PER_S` parameters per second of a node's processors. Ren et al. 2021, "ZeRO-Offload",
                 https://arxiv.org/abs/2101.06840.
    tensor       t ranks share each matrix product; 2 all-reduces of the residual stream per block and direction, which
                 do not overlap with computation. Norms and the residual stream are not sharded, unlike with sequence
                 parallelism. An adapter adds an all-reduce of its inner activations, ``rank`` numbers per token
                 (`zeroshard.lab.predict.cut`). Shoeybi et al. 2019, "Megatron-LM", https://arxiv.org/abs/1909.08053,
                 section 3.
    context      c ranks share a sequence; each all-gathers all keys and values in forward and backward, and their
                 gradients are reduce-scattered: torchtitan's "allgather". Grattafiori et al. 2024, "The Llama 3 Herd
                 of Models", https://arxiv.org/abs/2407.21783, section 3.3.2.
    pipeline     p stages of equally many blocks that alternate one forward and one backward (1F1B): m micro-batches
                 take (m + p - 1) / m of their time, and the first stage keeps the activations of min(m, p). Each stage
                 is counted with embedding and head. Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section
                 2.2.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.errors import UserError
from zeroshard.lab.predict.actions import Action, Compute, Moment, Step
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.hardware import LINKS
from zeroshard.lab.predict.timeline import Timing
from zeroshard.lab.predict.work import Work
from zeroshard.profiling.devices import Device

Offload = Literal["none", "optimizer"]
FP8_TIME = 0.67
FP8_DEVICES = (
    "h100",
    "h200",
    "h800",
    "h20",
    "b200",
    "b300",
    "gb200",
    "gb300",
    "l4",
    "l20",
    "l40s",
    "rtx-4090",
    "rtx-5090",
)
FP8_DEVICES += ("rtx-6000-ada", "rtx-pro-6000", "mi300x", "mi325x", "mi355x")
HOST_ADAM_PER_S = 4.5e9  # CPU-Adam on a DGX-2: 1 B parameters in 0.22 s (ZeRO-Offload, table 4)
HOST_LINKS = {"nvlink5": "pcie5", "nvlink4": "pcie5", "nvlink4-pcie": "pcie5", "nvlink3": "pcie4", "nvlink2": "pcie3"}
HOST_LINKS |= {"nvlink4-h800": "pcie5", "nvlink3-a800": "pcie4", "xgmi4": "pcie5", "xgmi3": "pcie5", "xgmi2": "pcie4"}


@dataclass(frozen=True)
class PlanOnly:
    """Settings of a plan for techniques that zeroshard's trainer does not have, except for ``fp8``.

    Attributes:
        optimizer_in_backward: whether each unit is updated as soon as its gradients are reduced, which are then freed.
        offload: ``optimizer``: master weights and optimizer states are in host memory.
        tensor_parallel, context_parallel, pipeline_parallel: number of ranks that share one copy of the model this way.
        fp8: whether blocks compute matrix products in 8 bits, which zeroshard's trainer can do.
    """

    optimizer_in_backward: bool = False
    offload: Offload = "none"
    tensor_parallel: int = 1
    context_parallel: int = 1
    pipeline_parallel: int = 1
    fp8: bool = False

    @property
    def num_ranks(self) -> int:
        """Number of ranks that work on the same rows."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel

    @property
    def named(self) -> tuple[str, ...]:
        """The settings in use that zeroshard's trainer does not have, by their flags."""
        found = ["optimizer_in_backward"] if self.optimizer_in_backward else []
        found += ["offload"] if self.offload != "none" else []
        sizes = ("tensor_parallel", "context_parallel", "pipeline_parallel")
        return (*found, *(f"{name} {getattr(self, name)}" for name in sizes if getattr(self, name) > 1))

    def check(self, world_size: int, device: Device) -> None:
        """Raise UserError if the settings are impossible or contradict each other.

        Args:
            world_size: number of all GPUs.
            device: the device of each.
        """
        for name in ("tensor_parallel", "context_parallel", "pipeline_parallel"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(name, f"{value!r} is not a whole number of at least 1", "give 1 or more")
        if world_size % self.num_ranks:
            last = next(name for name in self.named[::-1] if "parallel" in name)
            name, _, value = last.partition(" ")
            what = f"{value} makes groups of {self.num_ranks}, which do not divide {world_size} GPUs"
            raise UserError(name, what, "change it, or gpus")
        if self.offload not in ("none", "optimizer"):
            raise UserError("offload", f"{self.offload!r} is not a choice", "choose none or optimizer")
        if self.offload != "none" and self.optimizer_in_backward:
            raise UserError("offload", "the host updates after backward, not inside it", "leave one of the two out")
        if self.fp8 and not _computes_in_8_bits(device.name):
            what = f"{device.name} has no products of 8-bit floating point"
            raise UserError("dtype", what, f"choose bfloat16, or one of {', '.join(FP8_DEVICES)}")
        if self.offload != "none" and device.device_type != "cuda":
            is_tpu = device.device_type == "tpu"
            what = f"the host of a {device.name} is not known" if is_tpu else f"{device.name} is a host itself"
            raise UserError("offload", what, "leave it out, or name a GPU")


def _computes_in_8_bits(name: str) -> bool:
    """Whether a device has fp8 products, by its name in the table or the one that its driver reports."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    return any(words.issuperset(each.split("-")) for each in FP8_DEVICES)


def with_rates(step: Step, beside: PlanOnly, vocab_size: int) -> Step:
    """``step`` with the cost of its operations changed for `PlanOnly.fp8` and ``context_parallel``.

    ``vocab_size``: identifies the products of the head, which stay in 16 bits; 0: the model has no head.
    """
    if not beside.fp8 and beside.context_parallel == 1:
        return step
    known: dict[int, tuple[Work, ...]] = {}

    def changed(actions: Sequence[Action]) -> list[Action]:
        return [
            _changed(action, beside, vocab_size, known) if isinstance(action, Compute) else action for action in actions
        ]

    return replace(step, first=changed(step.first), middle=changed(step.middle), last=changed(step.last))


def pipelined(step: Step, beside: PlanOnly, num_micro: int, kept_bytes: int) -> Step:
    """``step`` with the activations, ``kept_bytes`` each, that the first pipeline stage keeps of more micro-batches."""
    more = min(num_micro, beside.pipeline_parallel) - 1
    if not more:
        return step

    def fuller(moment: Moment) -> Moment:
        kept = moment.by_category["activations"] + more * kept_bytes
        return replace(moment, by_category={**moment.by_category, "activations": kept})

    return replace(step, peak=fuller(step.peak), at_loss=None if step.at_loss is None else fuller(step.at_loss))


def _changed(action: Compute, beside: PlanOnly, vocab_size: int, known: dict[int, tuple[Work, ...]]) -> Compute:
    if id(action.work) not in known:
        known[id(action.work)] = tuple(_work(work, beside, vocab_size) for work in action.work)
    return replace(action, work=known[id(action.work)])


def _work(work: Work, beside: PlanOnly, vocab_size: int) -> Work:
    if work.attention:  # a rank's own queries, with the keys of all ranks
        times = beside.context_parallel
        batch, queries, keys, width = work.shape
        return replace(work, flops=work.flops * times, shape=(batch, queries, keys * times, width))
    if beside.fp8 and work.shape and vocab_size not in work.shape:
        return replace(work, flops=round(work.flops * FP8_TIME))
    return work


@dataclass(frozen=True)
class Stream:
    """Bytes that model-parallel ranks exchange: a micro-batch's residual stream, and a block's keys and values.

    Attributes:
        residual_bytes: bytes of rows x a rank's tokens x width.
        kv_bytes: bytes of rows x all tokens x 2 x width of keys.
        num_blocks: number of a rank's blocks.
        recomputes: whether blocks run forward twice.
        adapter_bytes: bytes of rows x a rank's tokens x the adapters' inner width (LoRA rank).
        adapters: number of adapters whose inner activations tensor-parallel ranks sum, in forward and in backward.
    """

    residual_bytes: int
    kv_bytes: int
    num_blocks: int
    recomputes: bool
    adapter_bytes: int = 0
    adapters: tuple[int, int] = (0, 0)

    def tensor_s(self, all_reduce_s: Callable[[int], float]) -> float:
        """Seconds of tensor-parallel all-reduces in a micro-batch; ``all_reduce_s`` maps bytes to seconds."""
        forward, backward = self.adapters
        inner = (1 + self.recomputes) * forward + backward
        found = (4 + 2 * self.recomputes) * self.num_blocks * all_reduce_s(self.residual_bytes)
        return found + (inner * all_reduce_s(self.adapter_bytes) if inner else 0.0)


def more_seconds(
    beside: PlanOnly,
    step: Step,
    timing: Timing,
    stream: Stream | None,
    device: Device,
    places: Cluster,
    cluster: Cluster,
    num_micro: int,
) -> dict[str, float]:
    """Seconds that these techniques add to a step, by setting; they do not overlap with computation.

    Args:
        beside: the settings.
        step: a rank's step.
        timing: the times of that step without them.
        stream: the exchange between model-parallel ranks for a micro-batch; None without model parallelism.
        device: the rank's device.
        places: the ranks that share states and rows, in which the GPUs of one tensor-parallel and pipeline-parallel
            group count as one; context-parallel ranks are consecutive.
        cluster: all GPUs and their links; tensor-parallel ranks are consecutive.
        num_micro: micro-batches of a step.
    """
    tensor, context, stages = beside.tensor_parallel, beside.context_parallel, beside.pipeline_parallel
    found: dict[str, float] = {}
    stream = stream or Stream(0, 0, 0, recomputes=False)
    if tensor > 1:
        each = stream.tensor_s(lambda num_bytes: cluster.collective_s("all_reduce", num_bytes, tensor))
        found["tensor_parallel"] = num_micro * each
    if context > 1:
        gather = places.collective_s("all_gather", stream.kv_bytes, context)
        scatter = places.collective_s("reduce_scatter", stream.kv_bytes, context)
        found["context_parallel"] = ((2 + stream.recomputes) * gather + scatter) * stream.num_blocks * num_micro
    if stages > 1:
        link = cluster.between if cluster.world_size > cluster.ranks_per_node else cluster.within
        hop = link.call_s + stream.residual_bytes / (link.bytes_per_s * link.share)
        bubble = (stages - 1) / num_micro * (timing.compute_s + sum(found.values()))
        found["pipeline_parallel"] = bubble + 2 * hop * (num_micro + stages - 1)
    if beside.offload != "none":
        found["offload"] = _host_s(step, device, cluster)
    return found


def _host_s(step: Step, device: Device, cluster: Cluster) -> float:
    """Seconds of the host's update or of its copies, whichever is longer: 16 bits each way per element of a rank."""
    link = LINKS[HOST_LINKS.get(device.link, device.link or "pcie4")]
    numel = step.offloaded_numel
    on_node = min(cluster.ranks_per_node, cluster.world_size)
    return max(numel * on_node / HOST_ADAM_PER_S, 2 * 2 * numel / (link.bytes_per_s * link.share))


def with_seconds(timing: Timing, more: dict[str, float]) -> Timing:
    """``timing`` with these seconds added as exposed communication."""
    if not more:
        return timing
    total = sum(more.values())
    return replace(
        timing,
        step_s=timing.step_s + total,
        exposed_s=timing.exposed_s + total,
        exposed_by={**timing.exposed_by, **more},
    )
