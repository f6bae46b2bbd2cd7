"""The device of a rank, and the numerics on it: dtype, TF32, and for ``reproducible`` a fixed order of summation."""

from __future__ import annotations

import torch

from zeroshard.host.errors import UserError
from zeroshard.host.launch import environment
from zeroshard.host.process import num_cpus
from zeroshard.settings.optimizer import WEIGHTS_IN_BF16
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup.compiled import with_compile

_WITH_TF32 = (8, 0)  # lowest compute capability with TF32: Ampere


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Return the device of this rank and make it current if it is a GPU; ``auto`` takes a GPU if there is one.

    Raises:
        UserError: there is no GPU for this rank: CUDA was asked for without GPUs, or there are more ranks than GPUs.
    """
    num_gpus = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and num_gpus == 0):
        return torch.device("cpu")
    if local_rank >= num_gpus:
        what = f"rank {local_rank} of this machine finds {num_gpus} CUDA devices"
        raise UserError("device", what, "start at most as many ranks as there are GPUs, or use --device cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def on_device(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Set torch's global switches as ``config`` says (TF32, determinism); return it with dtype and compile resolved.

    Raises:
        UserError: TF32 is asked for, or an attention of `transformers`, and the device does not support it.
    """
    if config.model.attention == "flex_attention" and device.type == "cpu":
        raise UserError("model.attention", "torch has no backward of flex_attention on a CPU", "use sdpa")
    if config.tf32 and device.type != "cuda":
        raise UserError("tf32", f"the device is {device}, and GPUs alone have TF32", "leave it out")
    if config.tf32 and torch.cuda.get_device_capability(device) < _WITH_TF32:
        raise UserError("tf32", f"a {torch.cuda.get_device_name(device)} has no TF32", "leave it out")
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = config.tf32
    if config.reproducible and device.type == "cpu":
        # Sums are split over a rank's threads: give each as many as it would have with the most ranks.
        torch.set_num_threads(max(1, num_cpus() // config.reproducible))
    elif config.reproducible:
        environment.use_deterministic_cublas()
        torch.use_deterministic_algorithms(True)
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010  the type has it not
    return with_compile(with_dtype(config, device), device)


def with_dtype(config: TrainConfig, device: torch.device) -> TrainConfig:
    """Return ``config`` with the dtype ``auto`` replaced: that of the weights if the optimizer decides it.

    Else it is bfloat16 if ``device`` has hardware for it, and float32 if not.
    """
    if config.dtype != "auto":
        return config
    if config.optimizer in WEIGHTS_IN_BF16:
        return config.resolved(dtype="bfloat16")
    has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return config.resolved(dtype="bfloat16" if has_bfloat16 else "float32")
