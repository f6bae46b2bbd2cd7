"""The numerics of a run on its device: compute dtype, TF32, and for ``reproducible`` a fixed order of summation."""

from __future__ import annotations

import torch

from zeroshard.errors import UserError
from zeroshard.launch import environment
from zeroshard.models.float8 import require_float8
from zeroshard.process import num_cpus
from zeroshard.train.config.config import TrainConfig

_WITH_TF32 = (8, 0)  # lowest compute capability with TF32: Ampere


def on_device(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Set torch's global switches as ``config`` says (TF32, determinism); return ``config`` with its dtype resolved.

    Raises:
        UserError: TF32 or fp8 is asked for, and the device does not support it.
    """
    if config.dtype == "fp8":
        require_float8(device)
    if config.tf32:
        _require_tf32(device)
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if config.reproducible:
        _add_up_alike(config.reproducible, device)
    return with_dtype(config, device)


def _add_up_alike(most_ranks: int, device: torch.device) -> None:
    """Fix the order in which a micro-batch's sums are computed, so that it does not depend on the number of ranks.

    On a CPU sums are split over a rank's threads, so each rank gets the number of threads that it would have with
    ``most_ranks`` ranks. On a GPU deterministic algorithms are switched on.
    """
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cpus() // most_ranks))
        return
    environment.use_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  the type has it not


def with_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return ``config`` with the dtype ``auto`` replaced by the one that it means on ``device``."""
    return config if config.dtype != "auto" else config.resolved(dtype=automatic_dtype(device))


def automatic_dtype(device: torch.device) -> str:
    """Return bfloat16 for a GPU with hardware support for it, else float32."""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def _require_tf32(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError("tf32", f"the device is {device}, and GPUs alone have TF32", "leave it out")
    if torch.cuda.get_device_capability(device) < _WITH_TF32:
        raise UserError("tf32", f"a {torch.cuda.get_device_name(device)} has no TF32", "leave it out")
