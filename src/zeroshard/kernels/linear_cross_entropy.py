"""The output projection fused with cross-entropy, by chunks of rows, so that the logits never exist all at once.

    loss = cross_entropy(hidden @ weight.T, targets)

For each chunk of rows: logits x = h W^T; their loss and, in place, their gradient g; then dh = g W and dW += g^T h,
summed in fp32. The part that goes row by row is Triton's, or `zeroshard.kernels.losses`' in PyTorch. Memory is one
chunk of logits and dW, instead of several times [tokens x vocab]. The matrix products are the same as in separate
forward and backward passes, and so is the time. Fused losses by chunks: Hsu et al. 2024, Liger-Kernel,
arXiv:2410.10989, section 3.2; Wijmans et al. 2024, arXiv:2411.09009, keep even a chunk on the chip.

[Note: Gradients made in forward]
    Forward computes and keeps the gradients for an upstream gradient of 1. Backward multiplies them by the upstream
    gradient. Without Triton the first backward does so in place if dtypes allow, so that the weight's gradient
    [vocab, width] exists once; a further one (``retain_graph``) computes them again, and ``create_graph``
    differentiates the reference: both from the inputs, which are saved as `torch.nn.functional.linear` would save
    them.

[Note: Odd vocabularies]
    cuBLAS is fast if rows begin at multiples of 16 bytes *and* the sizes of its matrices are multiples of 16 bytes
    (docs.nvidia.com/cuda/cublas, "Tensor Core Usage"). So with Triton the stride of a row of logits is padded to a
    multiple of `VOCAB_MULTIPLE` words, and a product over the vocabulary is split in two: one over the multiple below
    the vocabulary's size, one over the few words that are left. GPT-2's 50,257 words are 50,240 and 17.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels import losses as rows_in_torch
from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.cross_entropy_kernels import losses_and_gradient
from zeroshard.kernels.derivatives import is_transformed, once_differentiable
from zeroshard.kernels.dispatch import Choice, asked_for, choose
from zeroshard.kernels.launch import accumulator_dtype, opaque
from zeroshard.kernels.losses import (
    Reduction,
    check_loss_options,
    cross_entropy_reference,
    mean_scale,
    split_scale,
)

CHUNK_BYTES = 2**29  # of logits in a chunk on a GPU: large matrix products, and a small part of all logits
CPU_CHUNK_BYTES = 2**26
ROW_MULTIPLE = (
    128  # the number of rows of a chunk is a multiple of it: a tile of a matrix product; of 16 without Triton
)
VOCAB_MULTIPLE = 64  # see [Note: Odd vocabularies]

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

    The reference is used on a GPU if it was requested by name (``kernels``); where `is_transformed` says so; and inside
    `all_logits`, which torch.compile does not see. Compiled, the chunks are one node of the graph: the compiler's own
    loss would keep all logits.
    """
    if tensors[0].is_cuda and asked_for(kernels) == "reference":
        return False
    return torch.compiler.is_compiling() or not (_all_logits.get() or is_transformed(*tensors))


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


# ------------------------------------------------------------------------------------------------------- chunks


def rows_at_once(num_rows: int, vocab: int, itemsize: int, *, on_cuda: bool, triton: bool = False) -> int:
    """Return the rows of a chunk: chunks of equal size, each of about `CHUNK_BYTES` of logits at most."""
    most = max(1, (CHUNK_BYTES if on_cuda or triton else CPU_CHUNK_BYTES) // (vocab * itemsize))
    num_chunks = max(1, -(-num_rows // most))
    multiple = ROW_MULTIPLE if triton else 16
    return max(1, -(-num_rows // num_chunks // multiple) * multiple)


def _chunks(
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
    triton: bool,
    chunk_rows: int,
) -> None:
    """Write ``losses`` [rows] and the wanted gradients, chunk by chunk; the products are PyTorch's.

    hidden, d_hidden [rows, width]; weight [vocab, width]; targets [rows]; d_weight [vocab, width] in losses' dtype.
    ``triton``: whether the part that goes row by row is a kernel of `cross_entropy_kernels`.
    """
    options = (ignore_index, label_smoothing, z_loss)
    num_rows, vocab = hidden.shape[0], weight.shape[0]
    if num_rows == 0 and d_weight is not None:
        d_weight.zero_()
    needs_grad = d_hidden is not None or d_weight is not None
    spans = _spans(vocab) if triton else [slice(0, vocab)]
    padded_vocab = -(-vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE if triton else vocab
    buffer = torch.empty(min(chunk_rows, num_rows), padded_vocab, dtype=hidden.dtype, device=hidden.device)
    for start in range(0, num_rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, num_rows))
        h = hidden[chunk]
        logits = buffer[: h.shape[0], :vocab]
        for words in spans:
            torch.mm(h, weight[words].t(), out=logits[:, words])
        grad = logits if needs_grad else None
        if triton:
            losses_and_gradient(logits, targets[chunk], losses[chunk], None, grad, scale, *options)
        else:
            at_once = scale if needs_grad else None
            rows_in_torch.losses_and_gradient(logits, targets[chunk], losses[chunk], logits, at_once, *options)
        if d_hidden is not None and triton:
            wide = torch.empty(h.shape, dtype=losses.dtype, device=h.device)
            for words in spans:
                _product(logits[:, words], weight[words], wide, add=words.start > 0)
            d_hidden[chunk].copy_(wide)
            del wide  # otherwise it would still exist when the next chunk's is allocated
        elif d_hidden is not None:
            torch.mm(logits, weight, out=d_hidden[chunk])
        if d_weight is not None:
            for words in spans:
                _product(logits[:, words].t(), h, d_weight[words], add=start > 0)


def _spans(vocab: int) -> list[slice]:
    """Return the vocabulary in one or two pieces: all words up to a multiple of `VOCAB_MULTIPLE`, then the others."""
    whole = vocab // VOCAB_MULTIPLE * VOCAB_MULTIPLE
    return [slice(start, end) for start, end in ((0, whole), (whole, vocab)) if end > start]


def _product(a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
    """out = a @ b, or out += a @ b; chunks are summed in ``out``'s dtype."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=int(add), out=out)
    elif a.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=int(add), out=out)
    elif a.dtype == torch.float16:  # fp16's range is too small for a product of scaled gradients
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), beta=int(add), out=out)
    elif add:  # the CPU has no product with an output wider than its inputs, and narrow products are much faster
        out.add_(a @ b)
    else:
        out.copy_(a @ b)


# ----------------------------------------------------------------------------------------------------- autograd


def _loss_and_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, compute: Callable[..., None], *, triton: bool = False
) -> tuple[Tensor, tuple[Any, ...]]:
    """Return the loss, and d_hidden, d_weight and the factor by which backward must still multiply them, or None each.

    d_hidden [rows, width] is in hidden's dtype, d_weight [vocab, width] in the accumulator's.
    """
    *options, reduction = ctx.options
    ctx.shape, ctx.weight_dtype = hidden.shape, weight.dtype
    rows, targets = hidden.reshape(-1, hidden.shape[-1]), targets.flatten().contiguous()
    dtype = accumulator_dtype(hidden.dtype)
    scale = mean_scale(targets, options[0], reduction, dtype)
    losses = torch.empty(rows.shape[0], dtype=dtype, device=hidden.device)
    needs_hidden, needs_weight = ctx.needs_input_grad[:2]
    d_hidden = torch.empty(rows.shape, dtype=hidden.dtype, device=hidden.device) if needs_hidden else None
    d_weight = torch.empty(weight.shape, dtype=dtype, device=hidden.device) if needs_weight else None
    at_once, later = split_scale(scale, hidden.dtype)
    compute(rows, weight, targets, at_once, losses, d_hidden, d_weight, *options, triton, ctx.chunk_rows)
    return losses.sum() * scale, (d_hidden, d_weight, later)


_in_one_node = opaque("linear_cross_entropy", "losses", "d_hidden", "d_weight")(_chunks)


class _AsOneNode(torch.autograd.Function):
    """The loss, 0-dim, of hidden [..., width], weight [vocab, width] and targets [...]; the chunks are one node of a
    compiled graph.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        options: tuple[Any, ...],
        chunk_rows: int,
        triton: bool,
    ) -> Tensor:
        """hidden [..., width], weight [vocab, width], targets [...] int64 -> the loss, 0-dim, in fp32 or fp64."""
        ctx.options, ctx.chunk_rows = options, chunk_rows
        loss, gradients = _loss_and_gradients(ctx, hidden, weight, targets, _in_one_node, triton=triton)
        ctx.save_for_backward(*gradients)
        return loss

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
        return d_hidden, d_weight, None, None, None, None


class _WithoutTriton(torch.autograd.Function):
    """As `_AsOneNode`, in eager mode; see [Note: Gradients made in forward] for the difference."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, options: tuple[Any, ...], chunk_rows: int
    ) -> Tensor:
        """As `_AsOneNode.forward`."""
        ctx.save_for_backward(hidden, weight, targets)
        ctx.options, ctx.chunk_rows = options, chunk_rows
        loss, ctx.gradients = _loss_and_gradients(ctx, hidden, weight, targets, _chunks)
        return loss

    @staticmethod
    def backward(ctx: Any, *d_losses: Tensor) -> Any:
        """d_loss 0-dim -> gradients of hidden and weight in their shapes and dtypes, and None for all else."""
        (d_loss,) = d_losses
        if torch.is_grad_enabled():  # create_graph
            found = _differentiated(ctx, d_loss)
            return *found, None, None, None
        if ctx.gradients is None:
            ctx.gradients = _loss_and_gradients(ctx, *ctx.saved_tensors, _chunks)[1]
        (d_hidden, d_weight, later), ctx.gradients = ctx.gradients, None
        if later is not None:
            d_loss = d_loss * later
        if d_hidden is not None:
            d_hidden = _times(d_hidden, d_loss, d_hidden.dtype).view(ctx.shape)
        if d_weight is not None:
            d_weight = _times(d_weight, d_loss, ctx.weight_dtype)
        return d_hidden, d_weight, None, None, None


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

    The exceptions, in which the reference materializes them: see `can_chunk`.

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
    triton = choose("linear_cross_entropy", hidden.device, kernels) == "triton"
    if not triton and not can_chunk(kernels, hidden, weight):
        return linear_cross_entropy_reference(hidden, weight, targets, *options)
    sizes = (targets.numel(), weight.shape[0], hidden.element_size())
    rows = chunk_rows or rows_at_once(*sizes, on_cuda=hidden.is_cuda, triton=triton)
    options = (ignore_index, float(label_smoothing), float(z_loss), reduction)
    if triton or torch.compiler.is_compiling():
        return _AsOneNode.apply(hidden, weight, targets, options, rows, triton)
    return _WithoutTriton.apply(hidden, weight, targets, options, rows)


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
