"""Cross-entropy over a vocabulary in one pass for the loss and, in place of the logits, its gradient.

For a row x of logits with target t, V of them, smoothing s and z-loss weight z, with L = log sum exp(x):

    loss = L - (1 - s) x_t - s <x> + z L^2
    dx   = softmax(x) (1 + 2 z L) - (1 - s) onehot(t) - s / V

L is found online, with a running maximum (Milakov and Gimelshein 2018, arXiv:1805.02867); label smoothing: Szegedy et
al. 2015, arXiv:1512.00567, section 7; z-loss: PaLM, arXiv:2204.02311, section 5.

Bytes that must move, for 2-byte logits, loss and gradient together: 4 a logit in place. A row is read from memory once;
the second look, for the gradient, finds it in L2. Not in place, the gradient is made in the backward pass instead,
from the logits, which are then as they were: 6 a logit, and `backward` may run again.

[Note: One more factor]
    In place, the gradient is written before the upstream gradient is known. Backward multiplies it in place unless the
    factor is 1, and decides that on the device: a host that asked would wait for all that is queued.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from zeroshard.kernels import liger
from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator, accumulator_dtype, jit, next_power_of_2, opaque, rows_of, tl
from zeroshard.kernels.losses import Reduction, check_loss_options, check_target_range, mean_scale, split_scale

BLOCK = 8192  # logits at a time; 16 in each of 512 threads

# ---------------------------------------------------------------------------------------------------- reference


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


# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _gradient(x, cols, target, highest, factor, scale, SMOOTHING: tl.constexpr, VOCAB: tl.constexpr):
    grad = tl.exp(x - highest) * factor - SMOOTHING / VOCAB
    return (grad - tl.where(cols == target, 1.0 - SMOOTHING, 0.0)) * scale


@jit
def _write_gradient(
    logits_ptr, grad_ptr, target, highest, log_sum, scale, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    VOCAB: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One row; ``grad_ptr`` may be ``logits_ptr``. WHOLE columns come in full blocks, whose loads need no mask."""
    dtype = grad_ptr.dtype.element_ty
    # Not exp(x - lse): of a large lse fp32 has no digits left after the point.
    factor = tl.exp(-log_sum) * (1.0 + 2.0 * Z_LOSS * (highest + log_sum))
    if WHOLE > 0:
        # Fetched ahead: where gradient and logits are one, no compiler may move a load over a store.
        x_next = tl.load(logits_ptr + tl.arange(0, BLOCK), eviction_policy="evict_first")
        for start in range(0, WHOLE, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            x = x_next.to(ACC)
            x_next = tl.load(
                logits_ptr + BLOCK + cols, mask=start + BLOCK < WHOLE, other=0.0, eviction_policy="evict_first"
            )
            grad = _gradient(x, cols, target, highest, factor, scale, SMOOTHING, VOCAB)
            tl.store(grad_ptr + cols, grad.to(dtype), eviction_policy="evict_first")
    if TAIL > 0:
        cols = WHOLE + tl.arange(0, TAIL)
        x = tl.load(logits_ptr + cols, mask=cols < VOCAB, other=0.0).to(ACC)
        grad = _gradient(x, cols, target, highest, factor, scale, SMOOTHING, VOCAB)
        tl.store(grad_ptr + cols, grad.to(dtype), mask=cols < VOCAB)


@jit
def _fill_zeros(ptr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, VOCAB, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(ptr + cols, tl.zeros((BLOCK,), ptr.dtype.element_ty), mask=cols < VOCAB)


@jit
def _loss_kernel(
    logits_ptr, targets_ptr, grad_ptr, losses_ptr, stats_ptr, scale_ptr, logits_stride, grad_stride, ignore_index,
    KEEPS_STATS: tl.constexpr, WRITES_GRAD: tl.constexpr, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    VOCAB: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * logits_stride
    grad_ptr += row * grad_stride
    if target == ignore_index:
        tl.store(losses_ptr + row, tl.full([], 0.0, ACC))
        if WRITES_GRAD:
            _fill_zeros(grad_ptr, VOCAB, BLOCK)
    else:
        highest = tl.full([], float("-inf"), ACC)
        sum_exp = tl.full([], 0.0, ACC)
        sum_x = tl.full([], 0.0, ACC)
        if WHOLE > 0:
            sums = tl.zeros((BLOCK,), ACC)
            totals = tl.zeros((BLOCK,), ACC)
            x_next = tl.load(logits_ptr + tl.arange(0, BLOCK), eviction_policy="evict_last")
            for start in range(0, WHOLE, BLOCK):
                x = x_next.to(ACC)
                following = logits_ptr + BLOCK + start + tl.arange(0, BLOCK)
                x_next = tl.load(following, mask=start + BLOCK < WHOLE, other=0.0, eviction_policy="evict_last")
                higher = tl.maximum(highest, tl.max(x, axis=0))
                shift = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
                sums = sums * tl.exp(highest - shift) + tl.exp(x - shift)
                highest = higher
                if SMOOTHING > 0:
                    totals += x
            sum_exp = tl.sum(sums, axis=0)
            sum_x = tl.sum(totals, axis=0)
        if TAIL > 0:
            cols = WHOLE + tl.arange(0, TAIL)
            x = tl.load(logits_ptr + cols, mask=cols < VOCAB, other=float("-inf")).to(ACC)
            higher = tl.maximum(highest, tl.max(x, axis=0))
            shift = tl.where(higher == float("-inf"), 0.0, higher)
            sum_exp = sum_exp * tl.exp(highest - shift) + tl.sum(tl.exp(x - shift), axis=0)
            highest = higher
            if SMOOTHING > 0:
                sum_x += tl.sum(tl.where(cols < VOCAB, x, 0.0), axis=0)
        log_sum = tl.log(sum_exp)
        # A target that is none makes loss and gradient NaN: there is no right number.
        exists = (target >= 0) & (target < VOCAB)
        x_target = tl.load(logits_ptr + target, mask=exists, other=float("nan")).to(ACC)
        loss = (highest - x_target) + log_sum
        if SMOOTHING > 0:
            loss += SMOOTHING * (x_target - sum_x / VOCAB)
        if Z_LOSS > 0:
            loss += Z_LOSS * (highest + log_sum) * (highest + log_sum)
        tl.store(losses_ptr + row, loss)
        if KEEPS_STATS:
            tl.store(stats_ptr + 2 * row, highest)
            tl.store(stats_ptr + 2 * row + 1, log_sum)
        if WRITES_GRAD:
            tl.debug_barrier()  # every thread has the target's logit before one of them writes over it
            scale = tl.where(exists, tl.load(scale_ptr), float("nan"))
            _write_gradient(
                logits_ptr, grad_ptr, target, highest, log_sum, scale, SMOOTHING, Z_LOSS, VOCAB, WHOLE, BLOCK, TAIL, ACC
            )


@jit
def _gradient_kernel(
    logits_ptr, targets_ptr, stats_ptr, grad_ptr, scale_ptr, logits_stride, ignore_index, SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr, VOCAB: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets_ptr + row)
    logits_ptr += row * logits_stride
    grad_ptr += row * VOCAB
    if target == ignore_index:
        _fill_zeros(grad_ptr, VOCAB, BLOCK)
    else:
        exists = (target >= 0) & (target < VOCAB)
        scale = tl.where(exists, tl.load(scale_ptr), float("nan"))
        highest = tl.load(stats_ptr + 2 * row)
        log_sum = tl.load(stats_ptr + 2 * row + 1)
        _write_gradient(
            logits_ptr, grad_ptr, target, highest, log_sum, scale, SMOOTHING, Z_LOSS, VOCAB, WHOLE, BLOCK, TAIL, ACC
        )


@jit
def _scale_kernel(grad_ptr, factor_ptr, stride, VOCAB: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        grad_ptr += tl.program_id(0).to(tl.int64) * stride
        for start in range(0, VOCAB, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            grad = tl.load(grad_ptr + cols, mask=cols < VOCAB, other=0.0).to(ACC) * factor
            tl.store(grad_ptr + cols, grad.to(grad_ptr.dtype.element_ty), mask=cols < VOCAB)


# ---------------------------------------------------------------------------------------------------- launchers


def _blocks(vocab: int) -> dict[str, int]:
    whole = vocab // BLOCK * BLOCK
    tail = next_power_of_2(vocab - whole) if vocab > whole else 0
    # A vocabulary below one block is all tail; the block is then what zeros are written by.
    return {"VOCAB": vocab, "WHOLE": whole, "TAIL": tail, "BLOCK": BLOCK if whole else tail}


def _num_warps(blocks: dict[str, int]) -> int:
    return max(1, min(16, blocks["BLOCK"] // 512))


@opaque("cross_entropy_forward", "losses", "stats", "grad")
def losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    stats: Tensor | None,
    grad: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """logits, grad [rows, vocab], rows strided, perhaps the same memory; targets, losses [rows]; scale 0-dim.

    stats [rows, 2]: each row's maximum, and the logarithm of its sum of exponentials above that.
    """
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    blocks, written = _blocks(vocab), logits if grad is None else grad
    _loss_kernel[(num_rows,)](
        logits,
        targets,
        written,
        losses,
        losses if stats is None else stats,
        losses if scale is None else scale,
        logits.stride(0),
        written.stride(0),
        ignore_index,
        KEEPS_STATS=stats is not None,
        WRITES_GRAD=grad is not None,
        SMOOTHING=label_smoothing,
        Z_LOSS=z_loss,
        **blocks,
        ACC=accumulator(logits.dtype),
        num_warps=_num_warps(blocks),
    )


@opaque("cross_entropy_backward", "grad")
def _backward(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    scale: Tensor,
    grad: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """As `losses_and_gradient`; grad contiguous."""
    num_rows, vocab = logits.shape
    if num_rows == 0:
        return
    blocks = _blocks(vocab)
    _gradient_kernel[(num_rows,)](
        logits,
        targets,
        stats,
        grad,
        scale,
        logits.stride(0),
        ignore_index,
        SMOOTHING=label_smoothing,
        Z_LOSS=z_loss,
        **blocks,
        ACC=accumulator(logits.dtype),
        num_warps=_num_warps(blocks),
    )


def _scale_in_place(grad: Tensor, factor: Tensor) -> None:
    """grad [rows, vocab] *= factor (0-dim); nothing moves where that is 1. See [Note: One more factor]."""
    if grad.shape[0]:
        block = min(BLOCK, next_power_of_2(grad.shape[1]))
        acc = accumulator(grad.dtype)
        _scale_kernel[(grad.shape[0],)](
            grad, factor, grad.stride(0), VOCAB=grad.shape[1], BLOCK=block, ACC=acc, num_warps=max(1, block // 512)
        )


# ----------------------------------------------------------------------------------------------------- autograd


class _CrossEntropy(torch.autograd.Function):
    """The loss, 0-dim, of logits [..., vocab] and targets [...].

    ``inplace``: forward leaves the gradient where the logits were, and backward returns that memory. Else it keeps the
    logits and two numbers a row, and backward makes the gradient.
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
        rows, targets = rows_of(logits), targets.flatten().contiguous()
        dtype = accumulator_dtype(logits.dtype)
        losses = torch.empty(rows.shape[0], dtype=dtype, device=logits.device)
        scale = mean_scale(targets, ignore_index, reduction, dtype)
        options = (ignore_index, label_smoothing, z_loss)
        ctx.options, ctx.shape, ctx.in_place = options, logits.shape, inplace and ctx.needs_input_grad[0]
        if ctx.in_place:
            at_once, later = split_scale(scale, logits.dtype)
            losses_and_gradient(rows, targets, losses, None, rows, at_once, *options)
            increment_version(logits)  # whoever kept the logits for their own backward is told
            ctx.save_for_backward(logits, later)
        else:
            stats = torch.empty(rows.shape[0], 2, dtype=dtype, device=logits.device)
            losses_and_gradient(rows, targets, losses, stats, None, None, *options)
            ctx.save_for_backward(rows, targets, stats, scale)
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        if ctx.in_place:
            logits, later = ctx.saved_tensors
            grad = logits.detach()
            _scale_in_place(rows_of(grad), d_loss if later is None else d_loss * later)
            increment_version(grad)  # it is given away now: a second backward raises
        else:
            rows, targets, stats, scale = ctx.saved_tensors
            grad = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
            _backward(rows, targets, stats, scale * d_loss, grad, *ctx.options)
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
    """Cross-entropy in nats of ``targets`` under the softmax of ``logits``, over the targets that count.

    Args:
        logits: [..., vocab], fp16, bf16, fp32 or fp64, any strides.
        targets: [...], int64.
        ignore_index: the target that does not count.
        label_smoothing: s in [0, 1]: this share of the target's probability is spread over the vocabulary.
        z_loss: weight of the squared log-partition function, which keeps it near 0.
        reduction: ``"mean"`` over the targets that count (NaN without any, as in torch), or ``"sum"``.
        inplace: our kernels may write the gradient over the logits: half the memory and two thirds of the traffic.
            The logits are then gone after this call, and backward runs once; autograd raises where either is used
            again. Not for a leaf.
        check_targets: look for targets outside the vocabulary, and wait for the device to do so. False: such a target
            makes loss and gradient NaN on a GPU.
        kernels: who computes it; see `zeroshard.kernels.use_kernels`.

    Returns:
        0-dim, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument that does not fit, by its name.

    Sources: arXiv:1805.02867 (online softmax), arXiv:1512.00567 (smoothing), arXiv:2204.02311 (z-loss).
    """
    check_floating("logits", logits)
    if logits.ndim == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits: shape {tuple(logits.shape)} has no vocabulary; give [..., vocab]")
    check_device("targets", targets, "logits", logits)
    check_loss_options(targets, logits.shape[:-1], ignore_index, label_smoothing, z_loss, reduction)
    if check_targets:
        check_target_range(targets, logits.shape[-1], ignore_index)
    options = (ignore_index, label_smoothing, z_loss, reduction)
    backend = choose("cross_entropy", logits.device, kernels)
    if backend == "reference":
        return cross_entropy_reference(logits, targets, *options)
    if backend == "liger":
        return liger.cross_entropy(logits, targets, *options)
    if not torch.is_grad_enabled():  # autograd tells a function what takes gradients elsewhere, not whether any is due
        logits = logits.detach()
    inplace = inplace and not torch.compiler.is_compiling()  # there the compiler decides what lies where
    if inplace and logits.requires_grad:
        if logits.is_leaf:
            raise ValueError("logits: a leaf that requires a gradient cannot be written over; leave inplace out")
        if rows_of(logits).data_ptr() != logits.data_ptr():
            raise ValueError(f"logits: strides {logits.stride()} are not those of rows in memory; leave inplace out")
    return _CrossEntropy.apply(logits, targets, ignore_index, float(label_smoothing), float(z_loss), reduction, inplace)
