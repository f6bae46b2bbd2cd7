"""What replicas that take local steps hold for their meetings, and send at them.

With S the padded elements of a rank's shard of all trained buffers, and R replicas:

    held             8 S bytes: anchor and outer momentum in fp32, at every stage
    a meeting        all-reduce of the shard over the replicas, w S bytes every H steps; w is the wire's itemsize
    at stage 0       all-gather of the anchors inside the replica: m P bytes, m the masters' itemsize, P = S W

Over a link an all-reduce of B bytes among R ranks moves 2 (R - 1) / R B in each direction, and nothing else leaves a
replica but control messages. So what crosses is 1 / H of an all-reduce of the gradients at each step.

Douillard et al. 2023, DiLoCo, https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.conversions import across_replicas, conversion_s
from zeroshard.lab.predict.hardware import Device
from zeroshard.lab.predict.timeline import Timing
from zeroshard.zero import LocalSteps, ShardingStrategy
from zeroshard.zero.strategy import SHARD


@dataclass(frozen=True)
class Meetings:
    """What meetings cost one rank; all zeros where replicas take each step together.

    Attributes:
        every: steps from one meeting to the next.
        outer_bytes: resident: anchor and outer momentum.
        message_bytes: of the differences that travel at once, at the most.
        crossing_bytes: of differences on the wire, in ``every`` steps: what an all-reduce over replicas is given.
        comm_s: seconds that these take, and what follows inside the replica.
        quantise_s: seconds in which the rank quantises differences and takes them back.
        exposed_s: of them, those in which computation waits.
    """

    every: int = 1
    outer_bytes: int = 0
    message_bytes: int = 0
    crossing_bytes: int = 0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    quantise_s: float = 0.0

    @property
    def held_bytes(self) -> int:
        """At the fullest moment: with overlap a difference is on its way while a step runs."""
        return self.outer_bytes + self.message_bytes

    def added_to(self, timing: Timing) -> Timing:
        """``timing`` of a step with its share of the meetings."""
        return replace(
            timing,
            step_s=timing.step_s + (self.exposed_s + self.quantise_s) / self.every,
            compute_s=timing.compute_s + self.quantise_s / self.every,
            wire_s=timing.wire_s + self.quantise_s / self.every,
            comm_s=timing.comm_s + self.comm_s / self.every,
            exposed_s=timing.exposed_s + self.exposed_s / self.every,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def meetings_of(
    buffers: Sequence[Buffer],
    settings: LocalSteps,
    strategy: ShardingStrategy,
    cluster: Cluster,
    step_s: float,
    device: Device,
) -> Meetings:
    """What meetings come to in ``settings.every`` steps of ``step_s`` seconds each.

    A fragment travels while ``overlap_steps`` steps compute, and computation waits for what it takes longer.

    Args:
        buffers: of the model, root first, laid out for the ``shard_size``.
        settings: how replicas meet.
        strategy: the row of the stage table inside a replica.
        cluster: ranks and what joins them.
        step_s: of a step without a meeting.
        device: that quantises where differences travel in a format of their own.
    """
    shard_size = buffers[0].layout.world_size
    num_replicas = cluster.world_size // shard_size
    whole = strategy.optim is not SHARD and shard_size > 1
    comm_s = exposed_s = 0.0
    num_bytes: list[int] = []
    for fragment in range(settings.fragments):
        leaving, arriving = meeting_messages(buffers, settings, fragment, num_replicas, whole_masters=whole)
        crossing = [*leaving, *(m for m in arriving if m.phase == "difference")]
        across_s = sum(cluster.collective_s(m.op, m.num_bytes, num_replicas, replicas=True) for m in crossing)
        inside_s = sum(cluster.collective_s(m.op, m.num_bytes, shard_size) for m in arriving if m.phase == "anchor")
        comm_s += across_s + inside_s
        exposed_s += max(across_s - settings.overlap_steps * step_s, 0.0) + inside_s
        num_bytes.append(sum(m.num_bytes for m in leaving))
    at_once = max(num_bytes) if settings.overlap_steps else 0
    quantise_s = quantising_s(buffers, settings, num_replicas, device)
    return Meetings(settings.every, outer_bytes(buffers), at_once, sum(num_bytes), comm_s, exposed_s, quantise_s)


def quantising_s(buffers: Sequence[Buffer], settings: LocalSteps, num_replicas: int, device: Device) -> float:
    """Seconds in which a rank quantises the differences of all fragments, adds up pieces and takes sums back."""
    form = settings.form
    if form is None or num_replicas == 1:
        return 0.0
    numels = [buffer.layout.shard_numel for buffer in _trained(buffers)]
    parts = (across_replicas(form, n, num_replicas, gathers=g) for n in numels if n for g in (False, True))
    return sum(conversion_s(work, device) for part in parts for works in part for work in works)


def outer_bytes(buffers: Sequence[Buffer]) -> int:
    """Resident bytes on a rank of anchors and outer momentum; ``buffers`` are laid out for the ``shard_size``."""
    return sum(2 * buffer.layout.shard_numel * _wide(buffer.dtype).itemsize for buffer in _trained(buffers))


def meeting_messages(
    buffers: Sequence[Buffer], settings: LocalSteps, fragment: int, num_replicas: int, *, whole_masters: bool
) -> tuple[list[Message], list[Message]]:
    """The collectives when a fragment's difference leaves, and when it arrives, in order.

    In a block format pieces are exchanged when it leaves, and their sums gathered when it arrives.

    Args:
        buffers: of the model, root first, laid out for the ``shard_size``.
        settings: how replicas meet.
        fragment: which.
        num_replicas: how many there are.
        whole_masters: whether each rank holds whole masters (stage 0), and there are others in its replica.
    """
    units = list(dict.fromkeys(["root", *(buffer.unit for buffer in buffers)]))
    leaving: list[Message] = []
    arriving: list[Message] = []
    anchors: list[Message] = []
    for buffer in _trained(buffers):
        if settings.fragment_of(units.index(buffer.unit)) != fragment:
            continue
        layout, name, form = buffer.layout, buffer.name, settings.form
        if form is not None and layout.shard_numel:
            num_bytes = num_replicas * form.num_bytes(-(-layout.shard_numel // num_replicas))
            leaving.append(Message("all_to_all", num_bytes, name, "difference", num_replicas))
            arriving.append(Message("all_gather", num_bytes, name, "difference", num_replicas))
        else:
            num_bytes = layout.shard_numel * (settings.dtype or _wide(buffer.dtype)).itemsize
            leaving.append(Message("all_reduce", num_bytes, name, "difference", num_replicas))
        if whole_masters:
            num_bytes = layout.padded_numel * buffer.dtype.itemsize
            anchors.append(Message("all_gather", num_bytes, name, "anchor", layout.world_size))
    return leaving, [*arriving, *anchors]


def _trained(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [buffer for buffer in buffers if buffer.trained and buffer.dtype.is_floating_point]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
