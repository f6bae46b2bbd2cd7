"""Triton kernels of cross-entropy, and their launchers; `zeroshard.kernels.cross_entropy` has the formulas."""

from __future__ import annotations

from torch import Tensor

from zeroshard.kernels.launch import accumulator, jit, next_power_of_2, opaque, tl

BLOCK = 8192  # logits that a program processes at a time: 16 in each of 512 threads

# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _gradient(x, cols, target, highest, factor, scale, SMOOTHING: tl.constexpr, VOCAB: tl.constexpr):
    grad = tl.exp(x - highest) * factor - SMOOTHING / VOCAB
    # Not minus a `where` of two constants, which would round 1 - SMOOTHING to fp32 for fp64 logits too.
    return tl.where(cols == target, grad - (1.0 - SMOOTHING), grad) * scale


@jit
def _write_gradient(
    logits_ptr, grad_ptr, target, highest, log_sum, scale, SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr,
    VOCAB: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr, TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write one row's gradient; ``grad_ptr`` may be ``logits_ptr``. WHOLE columns form full blocks, loaded unmasked."""
    dtype = grad_ptr.dtype.element_ty
    # Not exp(x - lse): fp32 has no digits left after the point for a large lse.
    factor = tl.exp(-log_sum) * (1.0 + 2.0 * Z_LOSS * (highest + log_sum))
    if WHOLE > 0:
        # Prefetch the next block: if gradient and logits share memory, the compiler may not move a load over a store.
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
def _statistics(
    logits_ptr, SMOOTHING: tl.constexpr, VOCAB: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return a row's maximum, the sum of exp(x - maximum) and, with label smoothing, the sum of x, in one pass."""
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
    return highest, sum_exp, sum_x


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
        highest, sum_exp, sum_x = _statistics(logits_ptr, SMOOTHING, VOCAB, WHOLE, BLOCK, TAIL, ACC)
        log_sum = tl.log(sum_exp)
        # A target outside the vocabulary makes loss and gradient NaN, because no number would be right.
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
            tl.debug_barrier()  # every thread must have read the target's logit before any thread overwrites it
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


# ---------------------------------------------------------------------------------------------------- launchers


def _blocks(vocab: int) -> dict[str, int]:
    whole = vocab // BLOCK * BLOCK
    tail = next_power_of_2(vocab - whole) if vocab > whole else 0
    # A vocabulary below one block is all tail; BLOCK is then the number of zeros that `_fill_zeros` writes at a time.
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
    """Write losses and, if given, stats and grad.

    logits, grad [rows, vocab] with strided rows, possibly the same memory; targets, losses [rows]; scale 0-dim.
    stats [rows, 2]: each row's maximum, and the logarithm of the sum of exp(x - maximum).
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
def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    stats: Tensor,
    scale: Tensor,
    grad: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write grad, which is contiguous, by the saved stats; arguments as in `losses_and_gradient`."""
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
