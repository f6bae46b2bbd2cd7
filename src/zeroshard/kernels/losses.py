"""The common parts of both losses (`cross_entropy`, `linear_cross_entropy`): reference, checks, scale of gradients.

[Note: Small gradients]
    Some gradients are computed before the upstream gradient is known. If they were divided by the number of rows (mean)
    at that point, they would underflow in fp16, and loss scaling would come too late to prevent it. So in fp16 they are
    computed for `FP16_SCALE` times the sum of the losses, and backward applies the rest of the factor.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum"]
FP16_SCALE = 1024.0  # gradients of a sum are at most about 1: this gains ten bits, and stays far below 65504


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`cross_entropy` in PyTorch; half-precision logits are cast to fp32 first."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).reshape(-1, logits.shape[-1])
    targets = targets.flatten()
    loss = F.cross_entropy(
        logits, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if z_loss:
        kept = targets != ignore_index
        squares = torch.where(kept, logits.logsumexp(-1).square(), 0.0).sum()
        loss = loss + z_loss * (squares / kept.sum() if reduction == "mean" else squares)
    return loss


def mean_scale(targets: Tensor, ignore_index: int, reduction: Reduction, dtype: torch.dtype) -> Tensor:
    """Return 1 / (number of targets that count), or 1 for a sum; 0-dim, on the targets' device; inf if none counts."""
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=targets.device)
    return (targets != ignore_index).sum().to(dtype).reciprocal()


def split_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split ``scale`` into a gradient's factors in forward and in backward (None: 1); see [Note: Small gradients]."""
    if dtype != torch.float16:
        return scale, None
    return torch.full_like(scale, FP16_SCALE), scale.nan_to_num(posinf=0.0) / FP16_SCALE  # inf: no target counts


def check_loss_options(
    targets: Tensor,
    shape: tuple[int, ...],
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    *,
    check_targets: bool,
) -> None:
    """Raise ValueError for invalid arguments of a loss.

    Args:
        targets: [...], int64.
        shape: shape of the logits, [..., vocab].
        ignore_index, label_smoothing, z_loss, reduction: options as in `zeroshard.kernels.cross_entropy`.
        check_targets: whether to check for targets outside the vocabulary too, which waits for the device.
    """
    if targets.dtype != torch.int64:
        raise ValueError(f"targets: {targets.dtype} is not int64; cast them")
    if targets.shape != shape[:-1]:
        raise ValueError(f"targets: shape {tuple(targets.shape)} is not {tuple(shape[:-1])}, one for each row")
    if not isinstance(ignore_index, int):
        raise ValueError(f"ignore_index: {ignore_index!r} is not an integer")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing: {label_smoothing} is outside [0, 1]")
    if not (isfinite(z_loss) and z_loss >= 0.0):
        raise ValueError(f"z_loss: {z_loss} is not a finite number >= 0")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} is unknown; choose 'mean' or 'sum'")
    if check_targets and not torch.compiler.is_compiling():
        _check_target_range(targets, shape[-1], ignore_index)


def _check_target_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    wrong = ((targets < 0) | (targets >= vocab)) & (targets != ignore_index)
    if bool(wrong.any()):
        value = int(targets[wrong][0])
        raise ValueError(f"targets: {value} is outside 0..{vocab - 1} and is not ignore_index {ignore_index}")
