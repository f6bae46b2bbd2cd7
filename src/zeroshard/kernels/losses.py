"""What both losses (`cross_entropy`, `linear_cross_entropy`) have in common: reference, options, scale of gradients.

[Note: Small gradients]
    A gradient that is made before the upstream one is known must not already be as small as the mean over all rows
    makes it: fp16 would lose it, and a loss that is scaled up to prevent that comes too late. In fp16 it is made for
    `FP16_SCALE` times the sum of the losses, and what is missing joins the upstream gradient.
"""

from __future__ import annotations

from math import isfinite
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Reduction = Literal["mean", "sum"]
FP16_SCALE = 1024.0  # of gradients of at most about 1: ten bits more below, and far from 65504 above


def cross_entropy_reference(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`cross_entropy` in PyTorch; half-precision logits are widened to fp32 first."""
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
    """0-dim, on the targets' device: one over how many of them count, or 1 for a sum; inf where none does."""
    if reduction == "sum":
        return torch.ones((), dtype=dtype, device=targets.device)
    return (targets != ignore_index).sum().to(dtype).reciprocal()


def split_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """What a gradient of ``dtype`` is multiplied by as it is made, and what in backward: [Note: Small gradients]."""
    if dtype != torch.float16:
        return scale, None
    return torch.full_like(scale, FP16_SCALE), scale.nan_to_num(posinf=0.0) / FP16_SCALE  # no target: no gradient


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
    """Raise ValueError for arguments of a loss that do not fit.

    Args:
        targets: [...], int64.
        shape: [..., vocab], of the logits.
        ignore_index, label_smoothing, z_loss, reduction: as in `zeroshard.kernels.cross_entropy`.
        check_targets: whether to look for targets outside the vocabulary too, which waits for the device.
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
