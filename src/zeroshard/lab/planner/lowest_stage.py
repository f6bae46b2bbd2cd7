"""The lowest ZeRO stage at which a model's training step fits in the memory that is free now.

The rule is the plan's, the lowest stage that fits with room (`zeroshard.lab.planner.advice`), for a micro-batch that is
given and with memory alone: what the machine computes and sends in a second is not known when a run starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psutil
import torch

from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, ema_bytes
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.lab.predict.step import Settings, step_of
from zeroshard.models import LanguageModel
from zeroshard.zero import STAGES, MixedPrecision

GIB = 2**30
HEADROOM = 0.1  # of what is free: neighbours, fragments, communication's own


def stage_bytes(
    model: LanguageModel,
    world_size: int,
    dtype: torch.dtype,
    device_type: str = "cpu",
    *,
    micro_batch: int,
    seq_len: int,
    keeps_ema: bool = False,
    reshard_after_forward: bool = True,
    reduce_dtype: torch.dtype | None = None,
    leaves: int | None = None,
) -> dict[int, int]:
    """Bytes at the fullest moment of a step by stage, for AdamW: the planner's, activations and all.

    Args:
        model: on any device, the meta device too; with its ``eos_id``, where attention stays inside documents.
        world_size: ranks that shard.
        dtype: of forward and backward.
        device_type: ``"cpu"`` or ``"cuda"``.
        micro_batch, seq_len: rows and tokens of a forward.
        keeps_ema: whether there is a moving average of the weights.
        reshard_after_forward: whether stage 3 frees whole weights between forward and backward.
        reduce_dtype: of gradients on their way; None: fp32.
        leaves: as `zeroshard.Zero` takes them.
    """
    precision = MixedPrecision(dtype if dtype != torch.float32 else None, reduce_dtype)
    buffers = buffers_of(model, world_size, model.units, leaves=leaves)
    trace = trace_language_model(model, micro_batch, seq_len, precision, device_type=device_type)
    found = {}
    for stage, row in STAGES.items():
        # Two micro-batches hold what any number of them does.
        row = replace(row, reshard_after_forward=reshard_after_forward)
        how: dict[str, Any] = {"num_micro": 2, "uniform_order": device_type == "cpu", "leaves": leaves}
        settings = Settings(row, precision, device_type=device_type, **how)
        found[stage] = step_of(trace, buffers, OPTIMIZER_STATES["AdamW"], settings).peak.total
        found[stage] += ema_bytes(buffers, row, 0) if keeps_ema else 0
    return found


def fitting_stage(
    model: LanguageModel,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
    micro_batch: int,
    seq_len: int,
    keeps_ema: bool = False,
    reshard_after_forward: bool = True,
    reduce_dtype: torch.dtype | None = None,
    leaves: int | None = None,
    free_bytes: int | None = None,
) -> tuple[int, str]:
    """The lowest stage that fits, else 3, and why.

    Args:
        model, world_size, dtype, micro_batch, seq_len, keeps_ema, reshard_after_forward, reduce_dtype,
            leaves: as `stage_bytes`.
        device: this rank's.
        free_bytes: for this rank; None: what the device has free, on CPUs shared out to ``world_size`` ranks.
    """
    free = num_free_bytes(device, world_size) if free_bytes is None else free_bytes
    room = free * (1 - HEADROOM)
    needed = stage_bytes(
        model,
        world_size,
        dtype,
        device.type,
        micro_batch=micro_batch,
        seq_len=seq_len,
        keeps_ema=keeps_ema,
        reshard_after_forward=reshard_after_forward,
        reduce_dtype=reduce_dtype,
        leaves=leaves,
    )
    stage = next((stage for stage, num_bytes in needed.items() if num_bytes <= room), max(needed))
    fits = "" if needed[stage] <= room else ", which does not fit either"
    return stage, f"a step of {needed[stage] / GIB:.2f}GiB{fits} in {free / GIB:.2f}GiB free, {HEADROOM:.0%} to spare"


def num_free_bytes(device: torch.device, num_ranks: int) -> int:
    """Memory that this rank may still take."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // num_ranks
