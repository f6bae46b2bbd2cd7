"""Cross-entropy over a vocabulary, by one pass forward and one backward.

For a row x of logits with target t, V of them, smoothing s and z-loss weight z, with L = log sum exp(x):

    loss = L - (1 - s) x_t - s <x> + z L^2
    dx   = softmax(x) (1 + 2 z L) - (1 - s) onehot(t) - s / V

L is computed online, with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867); label smoothing: Szegedy
et al. 2015, arXiv:1512.00567, section 7; z-loss: PaLM, arXiv:2204.02311, section 5.

Least memory traffic, for 2-byte logits, loss and gradient together: 6 bytes per logit. Backward computes the gradient
from the unchanged logits, so that it may run again.

The reference is in `losses`, the kernels are in `cross_entropy_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.cross_entropy_kernels import gradient_of_logits, losses_and_gradient
from zeroshard.kernels.derivatives import once_differentiable
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator_dtype, rows_of
from zeroshard.kernels.losses import (
    Reduction,
    check_loss_options,
    cross_entropy_reference,
    mean_scale,
)

# ----------------------------------------------------------------------------------------------------- autograd


class _CrossEntropy(torch.autograd.Function):
    """The loss, 0-dim, of logits [..., vocab] and targets [...]; forward saves the logits and two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        reduction: Reduction,
    ) -> Tensor:
        """logits [..., vocab], targets [...] int64 -> the loss, 0-dim, in the accumulator's dtype."""
        rows, targets = rows_of(logits), targets.flatten().contiguous()
        dtype = accumulator_dtype(logits.dtype)
        losses = torch.empty(rows.shape[0], dtype=dtype, device=logits.device)
        scale = mean_scale(targets, ignore_index, reduction, dtype)
        options = (ignore_index, label_smoothing, z_loss)
        ctx.options, ctx.shape = options, logits.shape
        stats = torch.empty(rows.shape[0], 2, dtype=dtype, device=logits.device)
        losses_and_gradient(rows, targets, losses, stats, None, None, *options)
        ctx.save_for_backward(rows, targets, stats, scale)
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        """d_loss 0-dim -> the logits' gradient, [..., vocab] in their dtype, and None for all else."""
        rows, targets, stats, scale = ctx.saved_tensors
        grad = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        gradient_of_logits(rows, targets, stats, scale * d_loss, grad, *ctx.options)
        return grad.view(ctx.shape), None, None, None, None, None


# ------------------------------------------------------------------------------------------------------- public


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    check_targets: bool = True,
    kernels: Choice | None = None,
) -> Tensor:
    """Return the cross-entropy in nats of ``targets`` under the softmax of ``logits``, over the targets that count.

    Args:
        logits: [..., vocab], fp16, bf16, fp32 or fp64, any strides.
        targets: [...], int64.
        ignore_index: target value that does not count.
        label_smoothing: s in [0, 1]: the part of the target's probability that is spread over the vocabulary.
        z_loss: weight of the squared log-partition function, which keeps that function near 0.
        reduction: ``"mean"`` over the targets that count (NaN if there are none, as in torch), or ``"sum"``.
        check_targets: check for targets outside the vocabulary, which waits for the device. False: such a target makes
            loss and gradient NaN in our kernels.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Returns:
        0-dim, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an invalid argument; the message begins with its name.

    Sources: arXiv:1805.02867 (online softmax), arXiv:1512.00567 (smoothing), arXiv:2204.02311 (z-loss).
    """
    _check(logits, targets)
    options = (ignore_index, label_smoothing, z_loss, reduction)
    check_loss_options(targets, logits.shape, *options, check_targets=check_targets)
    if not torch.is_grad_enabled():  # needs_input_grad would say True even though grad mode is off
        logits = logits.detach()
    if choose("cross_entropy", logits.device, kernels) == "reference":
        return cross_entropy_reference(logits, targets, *options)
    return _CrossEntropy.apply(logits, targets, ignore_index, float(label_smoothing), float(z_loss), reduction)


def _check(logits: Tensor, targets: Tensor) -> None:
    check_floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: shape {tuple(logits.shape)} has no vocabulary; give [..., vocab]")
    check_device("targets", targets, "logits", logits)
