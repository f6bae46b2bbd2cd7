"""Predicts the memory and traffic of replicas that take local steps (DiLoCo).

Such replicas take an *outer step* after every H local steps: the mean over replicas of the difference between their
weights and the *global weights*, the last that they had in common, becomes the gradient of an outer optimizer with
momentum.
With S the padded elements of a rank's shard of all trained buffers, W ranks in a replica, and R replicas:

    resident         8 S bytes: global weights and outer momentum in fp32, at every stage
    an outer step    all-reduce of the shard over the replicas, w S bytes every H steps; w is the wire's itemsize
    at stage 0       all-gather of the global weights inside the replica: m P bytes, m the master's itemsize, P = S W

An all-reduce of B bytes among R ranks moves 2 (R - 1) / R B over a link in each direction, and only control messages
leave a replica otherwise. So the traffic between replicas is 1 / H of that of all-reducing the gradients at each step.

Douillard et al. 2023, DiLoCo, https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.conversions import across_replicas, conversion_s
from zeroshard.lab.predict.hardware import Device
from zeroshard.lab.predict.timeline import Timing
from zeroshard.zero import LocalSteps, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD


@dataclass(frozen=True)
class OuterStepCost:
    """The cost of outer steps for one rank; all zeros if replicas take each step together."""

    every: int = 1  # steps from one outer step to the next
    outer_bytes: int = 0  # resident bytes of global weights and outer momentum
    # bytes that a rank gives to the all-reduces over replicas, or to the all-to-alls if differences have a block
    # format, in ``every`` steps
    crossing_bytes: int = 0
    # seconds of these collectives and of those that follow, for all of which computation waits, in ``every`` steps
    comm_s: float = 0.0
    quantise_s: float = 0.0  # seconds in which the rank quantises and dequantises differences, in ``every`` steps

    def added_to(self, timing: Timing) -> Timing:
        """``timing`` of a step plus the step's share of the outer steps."""
        return replace(
            timing,
            step_s=timing.step_s + (self.comm_s + self.quantise_s) / self.every,
            compute_s=timing.compute_s + self.quantise_s / self.every,
            wire_s=timing.wire_s + self.quantise_s / self.every,
            comm_s=timing.comm_s + self.comm_s / self.every,
            exposed_s=timing.exposed_s + self.comm_s / self.every,
        )


def outer_step_cost(
    buffers: Sequence[Buffer],
    settings: LocalSteps,
    strategy: ShardingStrategy,
    cluster: Cluster,
    device: Device,
) -> OuterStepCost:
    """The cost of outer steps in ``settings.every`` steps.

    Args:
        buffers: the model's flat buffers, root first, laid out for the ``shard_size``.
        settings: when and how replicas take outer steps.
        strategy: the row of the stage table inside a replica.
        cluster: the ranks and the links between them.
        device: the rank's device, which quantises differences if they have a wire format.
    """
    shard_size = buffers[0].layout.world_size
    num_replicas = cluster.world_size // shard_size
    whole = strategy.optim is not SHARD and shard_size > 1
    found = [
        message
        for fragment in range(settings.fragments)
        for message in outer_step_messages(buffers, settings, fragment, num_replicas, unsharded_masters=whole)
    ]
    crossing = [message for message in found if message.phase == "difference"]
    comm_s = sum(cluster.collective_s(m.op, m.num_bytes, num_replicas, replicas=True) for m in crossing)
    comm_s += sum(cluster.collective_s(m.op, m.num_bytes, shard_size) for m in found if m.phase == "global_weights")
    num_bytes = sum(message.num_bytes for message in crossing if message.op != "all_gather")
    quantise_s = 0.0
    if settings.form is not None and num_replicas > 1:
        numels = [buffer.layout.shard_numel for buffer in _trained(buffers)]
        parts = (across_replicas(settings.form, n, num_replicas, gathers=g) for n in numels if n for g in (False, True))
        quantise_s = sum(conversion_s(work, device) for part in parts for works in part for work in works)
    return OuterStepCost(settings.every, outer_bytes(buffers), num_bytes, comm_s, quantise_s)


def outer_bytes(buffers: Sequence[Buffer]) -> int:
    """Resident bytes of global weights and outer momentum on a rank; ``buffers``: laid out for the ``shard_size``."""
    return sum(2 * buffer.layout.shard_numel * _wide(buffer.dtype).itemsize for buffer in _trained(buffers))


def outer_step_messages(
    buffers: Sequence[Buffer], settings: LocalSteps, fragment: int, num_replicas: int, *, unsharded_masters: bool
) -> list[Message]:
    """The collectives of a fragment's outer step, in order. In a block format pieces are exchanged, and sums gathered.

    Args:
        buffers: the model's flat buffers, root first, laid out for the ``shard_size``.
        settings: when and how replicas take outer steps.
        fragment: index of the fragment.
        num_replicas: number of replicas.
        unsharded_masters: whether each rank holds unsharded master weights (stage 0) in a replica of several ranks.
    """
    units = list(dict.fromkeys(["root", *(buffer.unit for buffer in buffers)]))
    differences: list[Message] = []
    sums: list[Message] = []
    global_weights: list[Message] = []
    for buffer in _trained(buffers):
        if settings.fragment_of(units.index(buffer.unit)) != fragment:
            continue
        layout, name, form = buffer.layout, buffer.name, settings.form
        if form is not None and layout.shard_numel:
            num_bytes = num_replicas * form.num_bytes(-(-layout.shard_numel // num_replicas))
            differences.append(Message("all_to_all", num_bytes, name, "difference", num_replicas))
            sums.append(Message("all_gather", num_bytes, name, "difference", num_replicas))
        else:
            num_bytes = layout.shard_numel * (settings.dtype or _wide(buffer.dtype)).itemsize
            differences.append(Message("all_reduce", num_bytes, name, "difference", num_replicas))
        if unsharded_masters:
            num_bytes = layout.padded_numel * buffer.dtype.itemsize
            global_weights.append(Message("all_gather", num_bytes, name, "global_weights", layout.world_size))
    return [*differences, *sums, *global_weights]


def _trained(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [buffer for buffer in buffers if buffer.trained and buffer.dtype.is_floating_point]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
