"""Chooses the lowest ZeRO stage at which a model's training step fits in the memory that is free now.

It follows the plan's rule, the lowest stage that fits with room (`zeroshard.lab.planner.advice`), but for a given
micro-batch and by memory only, because the machine's compute and network rates are not known when a run starts.
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
HEADROOM = 0.1  # share of free memory that must stay free: other processes, fragments, communicators' buffers


def stage_bytes(
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
) -> dict[int, int]:
    """Peak bytes of a step with AdamW, by stage, as the planner predicts them, activations included.

    Args:
        model: the model, on any device or the meta device; its ``eos_id`` is set if attention stays inside documents.
        world_size: number of ranks that shard.
        dtype: dtype of forward and backward.
        device: the rank's device.
        micro_batch, seq_len: rows of a micro-batch, and tokens of a row.
        keeps_ema: whether the run keeps a moving average of the weights.
        reshard_after_forward: whether stage 3 frees unsharded weights between forward and backward.
        reduce_dtype: dtype in which gradients are reduced; None: fp32.
        leaves: as `zeroshard.Zero` takes them.
    """
    precision = MixedPrecision(dtype if dtype != torch.float32 else None, reduce_dtype)
    buffers = buffers_of(model, world_size, model.units, leaves=leaves)
    trace = trace_language_model(model, micro_batch, seq_len, precision, device_type=device.type)
    found = {}
    for stage, row in STAGES.items():
        # Two micro-batches need as much memory as any larger number.
        row = replace(row, reshard_after_forward=reshard_after_forward)
        how: dict[str, Any] = {"num_micro": 2, "uniform_order": device.type == "cpu", "leaves": leaves}
        settings = Settings(row, precision, device_type=device.type, **how)
        found[stage] = step_of(trace, buffers, OPTIMIZER_STATES["AdamW"], settings).peak.total
        found[stage] += ema_bytes(buffers, row, 0) if keeps_ema else 0
    return found


def fitting_stage(
    model: LanguageModel,
    world_size: int,
    dtype: torch.dtype,
    device: torch.device,
    *shape: Any,
    free_bytes: int | None = None,
    **more: Any,
) -> tuple[int, str]:
    """The lowest stage that fits, or 3 if none does, and a phrase with the reason.

    Args:
        model, world_size, dtype, device, shape, more: as for `stage_bytes`.
        free_bytes: bytes that this rank may use; None: the device's free memory, on CPUs divided by ``world_size``.
    """
    free = num_free_bytes(device, world_size) if free_bytes is None else free_bytes
    room = free * (1 - HEADROOM)
    needed = stage_bytes(model, world_size, dtype, device, *shape, **more)
    stage = next((stage for stage, num_bytes in needed.items() if num_bytes <= room), max(needed))
    fits = "" if needed[stage] <= room else ", which does not fit either"
    return stage, f"a step of {needed[stage] / GIB:.2f}GiB{fits} in {free / GIB:.2f}GiB free, {HEADROOM:.0%} to spare"


def num_free_bytes(device: torch.device, num_ranks: int) -> int:
    """Bytes that this rank may still allocate: the device's free memory, on CPUs divided by ``num_ranks``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // num_ranks
