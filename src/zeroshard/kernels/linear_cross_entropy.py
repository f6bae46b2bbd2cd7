"""The output projection fused with cross-entropy, by chunks of rows, so that the logits never exist all at once.

    loss = cross_entropy(hidden @ weight.T, targets)

For each chunk of rows: logits = h W^T; their loss and, in place, their gradient g; then dh = g W and dW += g^T h, both
accumulated in fp32. Forward keeps the two gradients, and backward multiplies them by the upstream gradient. Memory is
one chunk of logits and dW, instead of several times [tokens x vocab]. The matrix products are the same as in separate
forward and backward passes, and so is the time. Fused losses by chunks: Hsu et al. 2024, Liger-Kernel,
arXiv:2410.10989, section 3.2; Wijmans et al. 2024, arXiv:2411.09009, keep even a chunk on the chip.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels import chunked_losses
from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.cross_entropy_kernels import losses_and_gradient
from zeroshard.kernels.derivatives import once_differentiable
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator_dtype, opaque
from zeroshard.kernels.losses import (
    Reduction,
    check_loss_options,
    cross_entropy_reference,
    mean_scale,
    split_scale,
)

CHUNK_BYTES = 2**29  # of logits in a chunk: large matrix products, and a small part of all logits
ROW_MULTIPLE = 128  # the number of rows of a chunk is a multiple of it: a tile of a matrix product
VOCAB_MULTIPLE = 64  # rows of logits are padded to a multiple of it: aligned loads for any vocabulary

# ---------------------------------------------------------------------------------------------------- reference


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """`linear_cross_entropy` in PyTorch, all logits at once."""
    logits = F.linear(hidden, weight)
    return cross_entropy_reference(logits, targets, ignore_index, label_smoothing, z_loss, reduction)


# ---------------------------------------------------------------------------------------------------- launchers
# The kernels are those of `zeroshard.kernels.cross_entropy`; the products are cuBLAS's.


def rows_at_once(num_rows: int, vocab: int, itemsize: int) -> int:
    """Return the rows of a chunk: chunks of equal size, each of about `CHUNK_BYTES` of logits at most."""
    most = max(1, CHUNK_BYTES // (vocab * itemsize))
    num_chunks = max(1, -(-num_rows // most))
    return -(-num_rows // num_chunks // ROW_MULTIPLE) * ROW_MULTIPLE


@opaque("linear_cross_entropy", "losses", "d_hidden", "d_weight")
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    scale: Tensor,
    losses: Tensor,
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    chunk_rows: int,
) -> None:
    """Write ``losses`` [rows] and the wanted gradients, chunk by chunk.

    hidden, d_hidden [rows, width]; weight [vocab, width]; targets [rows]; d_weight [vocab, width] in losses' dtype.
    """
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    if num_rows == 0 and d_weight is not None:
        d_weight.zero_()
    padded_vocab = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    buffer = torch.empty(min(chunk_rows, num_rows), padded_vocab, dtype=hidden.dtype, device=hidden.device)
    for start in range(0, num_rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, num_rows))
        h = hidden[chunk]
        logits = buffer[: h.shape[0], :vocab]
        torch.mm(h, weight.t(), out=logits)
        grad = logits if d_hidden is not None or d_weight is not None else None
        options = (ignore_index, label_smoothing, z_loss)
        losses_and_gradient(logits, targets[chunk], losses[chunk], None, grad, scale, *options)
        if d_hidden is not None:
            wide = torch.empty(h.shape, dtype=losses.dtype, device=h.device)
            _product(logits, weight, wide, add=False)
            d_hidden[chunk].copy_(wide)
        if d_weight is not None:
            _product(logits.t(), h, d_weight, add=start > 0)


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a @ b, or out += a @ b, without rounding intermediate results to a dtype narrower than ``out``'s."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif a.device.type == "cuda":
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    else:  # only CUDA has a product with an output wider than its inputs
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)


# ----------------------------------------------------------------------------------------------------- autograd


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss, 0-dim, of hidden [..., width], weight [vocab, width] and targets [...].

    Forward computes the gradients that are needed: hidden's in its dtype, the weight's in fp32 (fp64 for fp64).
    Backward multiplies them by the upstream gradient.
    """

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
        rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten().contiguous()
        dtype = accumulator_dtype(hidden.dtype)
        scale = mean_scale(targets, ignore_index, reduction, dtype)
        losses = torch.empty(rows.shape[0], dtype=dtype, device=hidden.device)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device) if needs_hidden else None
        d_weight = torch.empty(weight.shape, dtype=dtype, device=hidden.device) if needs_weight else None
        options = (ignore_index, label_smoothing, z_loss, chunk_rows)
        at_once, later = split_scale(scale, hidden.dtype)
        _forward(rows, weight, targets, at_once, losses, d_hidden, d_weight, *options)
        ctx.save_for_backward(d_hidden, d_weight, later)
        ctx.shape, ctx.weight_dtype = hidden.shape, weight.dtype
        return losses.sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> Any:
        """d_loss 0-dim -> gradients of hidden and weight in their shapes and dtypes, and None for all else."""
        d_hidden, d_weight, later = ctx.saved_tensors
        if later is not None:
            d_loss = d_loss * later
        if d_hidden is not None:  # in d_loss's dtype: the factor could be rounded or overflow in a narrower one
            d_hidden = (d_hidden.to(d_loss.dtype) * d_loss).to(d_hidden.dtype).view(ctx.shape)
        if d_weight is not None:
            scaled = torch.empty(d_weight.shape, dtype=ctx.weight_dtype, device=d_weight.device)
            d_weight = torch.mul(d_weight, d_loss, out=scaled)
        return d_hidden, d_weight, None, None, None, None, None, None


# ------------------------------------------------------------------------------------------------------- public


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    chunk_rows: int | None = None,
    check_targets: bool = True,
    kernels: Choice | None = None,
) -> Tensor:
    """`cross_entropy` of the logits ``hidden @ weight.T``, which never exist all at once.

    The exceptions, in which the reference materializes them: see `zeroshard.kernels.chunked_losses.can_chunk`.

    If a gradient is needed, forward computes it together with the loss; `backward` may run again. Under `torch.no_grad`
    and `torch.inference_mode` none is needed, and no memory is allocated for one.

    Args:
        hidden: [..., width], fp16, bf16, fp32 or fp64; under `torch.autocast` hidden and weight are cast to its dtype.
        weight: [vocab, width], hidden's dtype: that of an `nn.Linear` without bias.
        targets: [...], int64.
        ignore_index: target value that does not count.
        label_smoothing: as in `cross_entropy`.
        z_loss: as in `cross_entropy`.
        reduction: ``"mean"`` over the targets that count (NaN if there are none), or ``"sum"``.
        chunk_rows: rows whose logits exist at once, >= 1; None: about half a GiB of logits, or 64 MiB on a CPU.
        check_targets: as in `cross_entropy`.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Returns:
        0-dim, fp32 (fp64 for fp64 hidden states).

    Raises:
        ValueError: an invalid argument; the message begins with its name.

    Source: Hsu et al. 2024, arXiv:2410.10989.
    """
    hidden, weight = _autocast(hidden, weight)
    _check(hidden, weight, targets, chunk_rows)
    options = (ignore_index, label_smoothing, z_loss, reduction)
    check_loss_options(targets, (*hidden.shape[:-1], weight.shape[0]), *options, check_targets=check_targets)
    if not torch.is_grad_enabled():  # needs_input_grad would say True even though grad mode is off
        hidden, weight = hidden.detach(), weight.detach()
    backend = choose("linear_cross_entropy", hidden.device, kernels)
    if backend == "reference" and chunked_losses.can_chunk(kernels, hidden, weight):
        return chunked_losses.linear_cross_entropy(hidden, weight, targets, *options, chunk_rows=chunk_rows)
    if backend == "reference":
        return linear_cross_entropy_reference(hidden, weight, targets, *options)
    rows = chunk_rows or rows_at_once(targets.numel(), weight.shape[0], hidden.element_size())
    options = (ignore_index, float(label_smoothing), float(z_loss), reduction)
    return _LinearCrossEntropy.apply(hidden, weight, targets, *options, max(1, rows))


def _autocast(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to the dtype of `torch.autocast` if it is enabled, as for any other matrix product."""
    on = hidden.device.type
    if on == "meta" or not torch.is_autocast_enabled(on):  # torch 2.11 cannot compile `is_autocast_available`
        return hidden, weight
    narrow = torch.get_autocast_dtype(on)
    return hidden.to(narrow), weight.to(narrow)


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_rows: int | None) -> None:
    check_floating("hidden", hidden)
    if hidden.ndim == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden: shape {tuple(hidden.shape)} has no width; give [..., width]")
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(f"weight: shape {tuple(weight.shape)} is not [vocab, {hidden.shape[-1]}]")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight: {weight.dtype} is not hidden's {hidden.dtype}; cast one of them")
    check_device("weight", weight, "hidden", hidden)
    check_device("targets", targets, "hidden", hidden)
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows: {chunk_rows} is below 1")
