"""Cross-entropy over a vocabulary: one pass computes the loss and, in place of the logits, its gradient.

For a row x of logits with target t, V of them, smoothing s and z-loss weight z, with L = log sum exp(x):

    loss = L - (1 - s) x_t - s <x> + z L^2
    dx   = softmax(x) (1 + 2 z L) - (1 - s) onehot(t) - s / V

L is computed online, with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867); label smoothing: Szegedy
et al. 2015, arXiv:1512.00567, section 7; z-loss: PaLM, arXiv:2204.02311, section 5.

Least memory traffic, for 2-byte logits, loss and gradient together: 4 bytes per logit in place. A row is read from
memory once; the second read, for the gradient, finds it in L2. If not in place, backward computes the gradient from
the unchanged logits: 6 bytes per logit, and `backward` may run again.

The reference is in `losses`, the kernels are in `cross_entropy_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.cross_entropy_kernels import gradient_of_logits, losses_and_gradient, scale_in_place
from zeroshard.kernels.derivatives import once_differentiable
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator_dtype, rows_of
from zeroshard.kernels.losses import (
    Reduction,
    check_loss_options,
    cross_entropy_reference,
    mean_scale,
    split_scale,
)

# ----------------------------------------------------------------------------------------------------- autograd


class _CrossEntropy(torch.autograd.Function):
    """The loss, 0-dim, of logits [..., vocab] and targets [...].

    ``inplace``: forward overwrites the logits with the gradient, and backward returns that memory. Otherwise forward
    saves the logits and two numbers per row, and backward computes the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        reduction: Reduction,
        inplace: bool,
    ) -> Tensor:
        """logits [..., vocab], targets [...] int64 -> the loss, 0-dim, in the accumulator's dtype."""
        rows, targets = rows_of(logits), targets.flatten().contiguous()
        dtype = accumulator_dtype(logits.dtype)
        losses = torch.empty(rows.shape[0], dtype=dtype, device=logits.device)
        scale = mean_scale(targets, ignore_index, reduction, dtype)
        options = (ignore_index, label_smoothing, z_loss)
        ctx.options, ctx.shape, ctx.in_place = options, logits.shape, inplace and ctx.needs_input_grad[0]
        if ctx.in_place:
            at_once, later = split_scale(scale, logits.dtype)
            losses_and_gradient(rows, targets, losses, None, rows, at_once, *options)
            increment_version(logits)  # so that autograd raises if another operation saved the logits for backward
            ctx.save_for_backward(logits, later)
        else:
            stats = torch.empty(rows.shape[0], 2, dtype=dtype, device=logits.device)
            losses_and_gradient(rows, targets, losses, stats, None, None, *options)
            ctx.save_for_backward(rows, targets, stats, scale)
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        """d_loss 0-dim -> the logits' gradient, [..., vocab] in their dtype, and None for all else.

        Raises:
            RuntimeError: a second backward after the logits were overwritten.
        """
        if ctx.in_place:
            logits, later = ctx.saved_tensors
            grad = logits.detach()
            scale_in_place(rows_of(grad), d_loss if later is None else d_loss * later)
            increment_version(grad)  # the caller owns the gradient now: a second backward raises
        else:
            rows, targets, stats, scale = ctx.saved_tensors
            grad = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            gradient_of_logits(rows, targets, stats, scale * d_loss, grad, *ctx.options)
            grad = grad.view(ctx.shape)
        return grad, None, None, None, None, None, None


# ------------------------------------------------------------------------------------------------------- public


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    inplace: bool = False,
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
        inplace: let our kernels overwrite the logits with the gradient: half the memory, two thirds of the traffic.
            The logits are then lost after this call, and backward can run only once; autograd raises if either is used
            again. Not for a leaf.
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
    inplace = inplace and not torch.compiler.is_compiling()  # a compiler plans memory itself
    if inplace and logits.requires_grad:
        _check_writable(logits)
    return _CrossEntropy.apply(logits, targets, ignore_index, float(label_smoothing), float(z_loss), reduction, inplace)


def _check(logits: Tensor, targets: Tensor) -> None:
    check_floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: shape {tuple(logits.shape)} has no vocabulary; give [..., vocab]")
    check_device("targets", targets, "logits", logits)


def _check_writable(logits: Tensor) -> None:
    """Raise ValueError if the gradient cannot be written over these logits."""
    if logits.is_leaf:
        raise ValueError("logits: a leaf that requires a gradient cannot be written over; leave inplace out")
    rows = rows_of(logits)
    if rows.shape[0] > 1 and rows.stride(0) < rows.shape[1]:
        raise ValueError(f"logits: rows share memory (strides {logits.stride()}); leave inplace out")
    if rows.data_ptr() != logits.data_ptr():
        raise ValueError(f"logits: strides {logits.stride()} are not those of rows in memory; leave inplace out")
