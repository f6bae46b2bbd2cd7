"""The common parts of both losses (`cross_entropy`, `linear_cross_entropy`): reference, rows without Triton, checks.

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
BLOCK_BYTES = 2**23  # of fp32 logits that are processed at once on the CPU: they fit in a cache
CUDA_BLOCK_BYTES = 2**29
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


def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    grad: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the losses of rows and, if wanted, their gradients, in PyTorch, block after block and in place.

    Args:
        logits: [rows, vocab]; overwritten if ``grad`` is the same tensor.
        targets: [rows] int64.
        losses: output [rows] in the accumulator's dtype; 0 for an ignored target.
        grad: output [rows, vocab] in the logits' dtype: the gradient of ``scale`` times the sum of losses.
        scale: 0-dim; None: no gradient is wanted.
        ignore_index, label_smoothing, z_loss: options as in `zeroshard.kernels.cross_entropy`.
    """
    vocab, dtype = logits.shape[1], losses.dtype
    block_bytes = CUDA_BLOCK_BYTES if logits.is_cuda else BLOCK_BYTES
    at_once = max(1, block_bytes // (vocab * dtype.itemsize))
    options = (ignore_index, label_smoothing, z_loss)
    in_place = grad is logits and logits.dtype == dtype
    for start in range(0, logits.shape[0], at_once):
        block = slice(start, start + at_once)
        x = logits[block] if in_place else logits[block].to(dtype, copy=True)
        _block(x, targets[block], losses[block], scale, *options)
        if scale is not None and grad is not None and not in_place:
            grad[block].copy_(x)


def _block(
    x: Tensor,
    targets: Tensor,
    losses: Tensor,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write ``losses`` [rows] of ``x`` [rows, vocab], which is overwritten: with its gradient if ``scale`` is given."""
    ignored = (targets == ignore_index).unsqueeze(1)
    targets = targets.unsqueeze(1).masked_fill(ignored, 0)
    peak = x.amax(1, keepdim=True)
    loss = _at(x, targets).mul_(label_smoothing - 1.0)
    if label_smoothing:
        loss.sub_(x.mean(1, keepdim=True), alpha=label_smoothing)
    total = x.sub_(peak).exp_().sum(1, keepdim=True)
    lse = total.log().add_(peak)
    loss.add_(lse)
    if z_loss:
        loss.add_(lse.square(), alpha=z_loss)
    losses.copy_(loss.masked_fill_(ignored, 0.0).squeeze(1))
    if scale is None:
        return
    scales = scale.expand_as(lse).masked_fill(ignored, 0.0)
    x.mul_((scales * lse.mul_(2 * z_loss).add_(1.0)).div_(total))
    x.scatter_add_(1, targets, scales * (label_smoothing - 1.0))
    if label_smoothing:
        x.sub_(scales, alpha=label_smoothing / x.shape[1])


def _at(x: Tensor, targets: Tensor) -> Tensor:
    """x [rows, vocab], targets [rows, 1] -> the targets' logits [rows, 1]; an invalid target raises on the CPU."""
    try:
        return x.gather(1, targets)
    except RuntimeError:
        wrong = targets[(targets < 0) | (targets >= x.shape[1])]
        if targets.is_cuda or not len(wrong):
            raise
        what = f"targets: {int(wrong[0])} is outside 0..{x.shape[1] - 1} and is not the index that is ignored"
        raise IndexError(f"{what}; check the tokenizer") from None


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
