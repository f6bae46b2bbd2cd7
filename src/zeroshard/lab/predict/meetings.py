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

import torch

from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.zero import LocalSteps


def outer_bytes(buffers: Sequence[Buffer]) -> int:
    """Resident bytes on a rank of anchors and outer momentum; ``buffers`` are laid out for the ``shard_size``."""
    return sum(2 * buffer.layout.shard_numel * _wide(buffer.dtype).itemsize for buffer in _trained(buffers))


def meeting_messages(
    buffers: Sequence[Buffer], settings: LocalSteps, fragment: int, num_replicas: int, *, whole_masters: bool
) -> tuple[list[Message], list[Message]]:
    """The collectives when a fragment's difference leaves, and when it arrives, in order.

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
    for buffer in _trained(buffers):
        if settings.fragment_of(units.index(buffer.unit)) != fragment:
            continue
        wire = settings.wire or _wide(buffer.dtype)
        layout, name = buffer.layout, buffer.name
        leaving.append(Message("all_reduce", layout.shard_numel * wire.itemsize, name, "difference", num_replicas))
        if whole_masters:
            num_bytes = layout.padded_numel * buffer.dtype.itemsize
            arriving.append(Message("all_gather", num_bytes, name, "anchor", layout.world_size))
    return leaving, arriving


def _trained(buffers: Sequence[Buffer]) -> list[Buffer]:
    return [buffer for buffer in buffers if buffer.trained and buffer.dtype.is_floating_point]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
