"""Checks of arguments that all operations share; a failure is a ValueError that begins with the argument's name."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_floating(name: str, tensor: Tensor) -> None:
    """Raise ValueError if ``tensor`` has another dtype than fp16, bf16, fp32 or fp64."""
    if tensor.dtype not in FLOATING:
        raise ValueError(f"{name}: {tensor.dtype} is not supported; give float16, bfloat16, float32 or float64")


def check_device(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two tensors are on different devices."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: on {tensor.device}, and {other_name} is on {other.device}; move it there")


def check_alike(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ValueError if two tensors differ in shape, dtype or device."""
    if tensor.shape != other.shape:
        raise ValueError(f"{name}: shape {tuple(tensor.shape)} is not {other_name}'s {tuple(other.shape)}")
    if tensor.dtype != other.dtype:
        raise ValueError(f"{name}: {tensor.dtype} is not {other_name}'s {other.dtype}; cast one of them")
    check_device(name, tensor, other_name, other)
