"""In which type of numbers a run computes on the device that it has found, and in which order it adds them up."""

from __future__ import annotations

import torch

from zeroshard.errors import UserError
from zeroshard.launch import environment
from zeroshard.models.float8 import require_float8
from zeroshard.process import num_cpus
from zeroshard.train.config.config import TrainConfig

_WITH_TF32 = (8, 0)  # compute capability: Ampere


def on_device(config: TrainConfig, device: torch.device) -> TrainConfig:
    """`with_dtype`, with TF32 switched as ``config`` says.

    Raises:
        UserError: TF32 or fp8 is asked for, and the device has none.
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
    """Have a micro-batch add up in the same order in every process of a machine, however many ranks there are.

    The threads of a CPU's rank share out sums, so they are as many as at the most ranks. A GPU's kernels take turns.
    """
    if device.type == "cpu":
        torch.set_num_threads(max(1, num_cpus() // most_ranks))
        return
    environment.use_deterministic_cublas()
    torch.use_deterministic_algorithms(True)
    setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  the type has it not


def with_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """``config`` with the dtype that ``auto`` means on ``device``."""
    return config if config.dtype != "auto" else config.model_copy(update={"dtype": automatic_dtype(device)})


def automatic_dtype(device: torch.device) -> str:
    """bfloat16 on a GPU that computes in it, else float32."""
    has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if has_it else "float32"


def _require_tf32(device: torch.device) -> None:
    if device.type != "cuda":
        raise UserError("tf32", f"the device is {device}, and GPUs alone have TF32", "leave it out")
    if torch.cuda.get_device_capability(device) < _WITH_TF32:
        raise UserError("tf32", f"a {torch.cuda.get_device_name(device)} has no TF32", "leave it out")
