"""`linear_cross_entropy` in plain PyTorch, by chunks of rows: used when the Triton kernels are not, as on the CPU.

    for each chunk of rows:   x = h W^T;   loss, and g = dloss/dx in x's own memory;   dh = g W;   dW += g^T h

`torch.nn.functional.cross_entropy` needs memory for three tensors of the logits' size: logits, log-softmax, gradient.
Here one chunk of logits exists at a time, and the row-wise part processes it in place, in blocks that fit in a cache.
The formulas are `zeroshard.kernels.cross_entropy`'s; the references beside the public functions are the specification.

[Note: Gradients made in forward]
    Forward computes and keeps the gradients for an upstream gradient of 1. The first backward multiplies them by the
    upstream gradient, in place if dtypes allow, and returns them, so the weight's gradient [vocab, width] exists once.
    A further backward (``retain_graph``) computes them again, and ``create_graph`` differentiates the reference: both
    from the inputs, which are saved as `torch.nn.functional.linear` would save them.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels.derivatives import is_transformed
from zeroshard.kernels.dispatch import Choice, asked_for
from zeroshard.kernels.launch import accumulator_dtype
from zeroshard.kernels.losses import Reduction, cross_entropy_reference, mean_scale, split_scale

CHUNK_BYTES = 2**26  # of logits in a chunk on the CPU: large matrix products, and a small part of all logits
CUDA_CHUNK_BYTES = 2**29
BLOCK_BYTES = 2**23  # of fp32 logits that the row-wise part processes at once on the CPU: they fit in a cache
ROW_MULTIPLE = 16  # the number of rows of a chunk is a multiple of it


_all_logits: ContextVar[bool] = ContextVar("all_logits", default=False)


@contextmanager
def all_logits() -> Generator[None]:
    """In this block, on this thread, compute losses by the references, which materialize all logits, not by chunks."""
    token = _all_logits.set(True)
    try:
        yield
    finally:
        _all_logits.reset(token)


def can_chunk(kernels: Choice | None, *tensors: Tensor) -> bool:
    """Whether to compute a loss of these tensors by chunks; if not, use the reference, with PyTorch's own behaviour.

    The reference is used on a GPU if it was requested by name (``kernels``); under torch.compile, which fuses in its
    own way; where `is_transformed` says so; and inside `all_logits`.
    """
    if torch.compiler.is_compiling() or _all_logits.get():
        return False
    if tensors[0].is_cuda and asked_for(kernels) == "reference":
        return False
    return not is_transformed(*tensors)


def rows_at_once(num_rows: int, vocab: int, itemsize: int, *, on_cuda: bool) -> int:
    """Return the rows of a chunk: chunks of equal size, each of about `CHUNK_BYTES` (`CUDA_CHUNK_BYTES`) at most."""
    most = max(1, (CUDA_CHUNK_BYTES if on_cuda else CHUNK_BYTES) // (vocab * itemsize))
    num_chunks = max(1, -(-num_rows // most))
    return max(1, -(-num_rows // num_chunks // ROW_MULTIPLE) * ROW_MULTIPLE)


# -------------------------------------------------------------------------------------------------- blocks of rows


def _losses_and_gradient(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    grad: Tensor | None,
    scale: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Write the losses of rows and, if wanted, their gradients, block after block.

    Args:
        logits: [rows, vocab]; overwritten if ``grad`` is the same tensor.
        targets: [rows] int64.
        losses: output [rows] in the accumulator's dtype; 0 for an ignored target.
        grad: output [rows, vocab] in the logits' dtype: the gradient of ``scale`` times the sum of losses.
        scale: 0-dim; None: no gradient is wanted.
        ignore_index, label_smoothing, z_loss: options as in `zeroshard.kernels.cross_entropy`.
    """
    vocab, dtype = logits.shape[1], losses.dtype
    block_bytes = CUDA_CHUNK_BYTES if logits.is_cuda else BLOCK_BYTES
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


# ------------------------------------------------------------------------------------- the projection and its loss


def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    options: tuple[int, float, float],
    chunk_rows: int,
) -> None:
    """Write ``losses`` [rows] and the wanted gradients, chunk by chunk.

    hidden, d_hidden [rows, width]; weight [vocab, width]; targets [rows]; d_weight [vocab, width] in losses' dtype.
    """
    num_rows, wanted = hidden.shape[0], d_hidden is not None or d_weight is not None
    if num_rows == 0 and d_weight is not None:
        d_weight.zero_()
    buffer = torch.empty(min(chunk_rows, num_rows), weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for start in range(0, num_rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, num_rows))
        h = hidden[chunk]
        logits = buffer[: h.shape[0]]
        torch.mm(h, weight.t(), out=logits)
        _losses_and_gradient(logits, targets[chunk], losses[chunk], logits, scale if wanted else None, *options)
        if d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if d_weight is not None:
            _add_product(d_weight, logits.t(), h, first=start == 0)


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """out += a @ b, or out = a @ b for the first chunk; chunks are summed in ``out``'s dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(not first), out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(not first), out=out)
    elif a.dtype == torch.float16:  # fp16's range is too small for a product of scaled gradients
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(not first), out=out)
    elif first:  # the CPU has no product with an output wider than its inputs, and narrow products are much faster
        out.copy_(a @ b)
    else:
        out.add_(a @ b)


class _LinearLoss(torch.autograd.Function):
    """The loss, 0-dim, of hidden [..., width], weight [vocab, width] and targets [...]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
        reduction: Reduction,
        chunk_rows: int,
    ) -> Tensor:
        """hidden [..., width], weight [vocab, width], targets [...] int64 -> the loss, 0-dim, in fp32 or fp64."""
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options, ctx.chunk_rows = (ignore_index, label_smoothing, z_loss, reduction), chunk_rows
        loss, ctx.gradients = _loss_and_gradients(ctx, hidden, weight, targets)
        return loss

    @staticmethod
    def backward(ctx: Any, *d_losses: Tensor) -> Any:
        """d_loss 0-dim -> gradients of hidden and weight in their shapes and dtypes, and None for all else."""
        (d_loss,) = d_losses
        if torch.is_grad_enabled():  # create_graph
            found = _differentiated(ctx, d_loss)
            return *found, None, None, None, None, None, None
        if ctx.gradients is None:
            ctx.gradients = _loss_and_gradients(ctx, *ctx.saved_tensors)[1]
        (d_hidden, d_weight, later), ctx.gradients = ctx.gradients, None
        if later is not None:
            d_loss = d_loss * later
        if d_hidden is not None:
            d_hidden = _times(d_hidden, d_loss, d_hidden.dtype).view(ctx.shape)
        if d_weight is not None:
            d_weight = _times(d_weight, d_loss, ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None, None, None, None


def _loss_and_gradients(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the loss, and d_hidden, d_weight and the factor by which backward must still multiply them, or None each.

    d_hidden [rows, width] is in hidden's dtype, d_weight [vocab, width] in the accumulator's.
    """
    *options, reduction = ctx.options
    ctx.shape, ctx.weight_dtype = hidden.shape, weight.dtype
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    dtype = accumulator_dtype(hidden.dtype)
    scale = mean_scale(targets, options[0], reduction, dtype)
    losses = torch.empty(rows.shape[0], dtype=dtype, device=hidden.device)
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    d_hidden = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device) if needs_hidden else None
    d_weight = torch.empty(weight.shape, dtype=dtype, device=hidden.device) if needs_weight else None
    at_once, later = split_scale(scale, hidden.dtype)
    _forward(rows, weight, targets, at_once, losses, d_hidden, d_weight, tuple(options), ctx.chunk_rows)
    return losses.sum() * scale, (d_hidden, d_weight, later)


def _times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``grad * factor`` in ``dtype``: in place if all dtypes agree; computed in factor's dtype otherwise."""
    if grad.dtype == dtype == factor.dtype:
        return grad.mul_(factor)
    return grad.to(factor.dtype).mul_(factor).to(dtype) if grad.dtype != factor.dtype else grad.mul(factor).to(dtype)


def _differentiated(ctx: Any, d_loss: Tensor) -> list[Tensor | None]:
    """Return the gradients of hidden and weight with a graph of their own, for ``create_graph``."""
    hidden, weight, targets = ctx.saved_tensors
    inputs = [x for x, needed in zip((hidden, weight), ctx.needs_input_grad, strict=False) if needed]
    loss = cross_entropy_reference(torch.nn.functional.linear(hidden, weight), targets, *ctx.options)
    found = iter(torch.autograd.grad(loss, inputs, d_loss, create_graph=True))
    return [next(found) if needed else None for needed in ctx.needs_input_grad[:2]]


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *options: Any, chunk_rows: int | None
) -> Tensor:
    """Return the loss; arguments must be checked; ``options`` as in this file's `cross_entropy`."""
    sizes = (targets.numel(), weight.shape[0], hidden.element_size())
    rows = chunk_rows or rows_at_once(*sizes, on_cuda=hidden.is_cuda)
    return _LinearLoss.apply(hidden, weight, targets, *options, rows)
