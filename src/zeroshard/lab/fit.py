"""The lowest ZeRO stage at which a model's training state fits in the memory that is free now."""

from __future__ import annotations

import psutil
import torch

from zeroshard.lab.buffers import buffers_of
from zeroshard.lab.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.models import LanguageModel
from zeroshard.zero import STAGES, MixedPrecision

GIB = 2**30
FOR_ACTIVATIONS = 0.2  # of what is free; no prediction of theirs is made here


def stage_bytes(model: LanguageModel, world_size: int, dtype: torch.dtype, device_type: str = "cpu") -> dict[int, int]:
    """Bytes of training state on the fullest rank by stage, for AdamW; at stage 3 with two whole units under way.

    Args:
        model: on any device, the meta device too.
        world_size: ranks that shard.
        dtype: of forward and backward.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    precision = MixedPrecision(param_dtype=dtype) if dtype != torch.float32 else MixedPrecision()
    buffers = buffers_of(model, world_size, list(model.blocks))
    largest = max(buffer.layout.padded_numel * buffer.dtype.itemsize for buffer in buffers)
    found = {}
    for stage, row in STAGES.items():
        by_rank = (
            state_bytes(buffers, row, rank, OPTIMIZER_STATES["AdamW"], precision, device_type=device_type)
            for rank in range(world_size)
        )
        transient = 0 if stage < 2 else largest if stage == 2 else 2 * largest
        found[stage] = max(sum(each.values()) for each in by_rank) + transient
    return found


def fitting_stage(
    model: LanguageModel, world_size: int, dtype: torch.dtype, device: torch.device, free_bytes: int | None = None
) -> tuple[int, str]:
    """The lowest stage that fits, else 3, and why.

    Args:
        model, world_size, dtype: as `stage_bytes`.
        device: this rank's.
        free_bytes: for this rank; None: what the device has free, on CPUs shared out to ``world_size`` ranks.
    """
    free = num_free_bytes(device, world_size) if free_bytes is None else free_bytes
    room = free * (1 - FOR_ACTIVATIONS)
    needed = stage_bytes(model, world_size, dtype, device.type)
    stage = next((stage for stage, num_bytes in needed.items() if num_bytes <= room), max(needed))
    fits = "" if needed[stage] <= room else ", which does not fit either"
    return stage, f"state of {needed[stage] / GIB:.2f}GiB{fits} in {free / GIB:.2f}GiB free, 20% for activations"


def num_free_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that this rank may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // num_ranks
