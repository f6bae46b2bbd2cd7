"""LayerNorm and RMSNorm over the last dimension, forward and backward, with the residual addition fused in.

    h = x + residual                                                     if a residual is given
    layer_norm:  y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias
    rms_norm:    y = h / sqrt(mean(h^2) + eps) * weight

With z the normalised row, g = dy * weight, and averages <.> over a row:

    dh = (g - z <g z> - <g>) / sqrt(var + eps)      (rms_norm: without <g>)
    dweight = sum over rows of dy * z,  dbias = sum over rows of dy

Layer Normalization, Ba et al. 2016, arXiv:1607.06450; RMSNorm, Zhang and Sennrich 2019, arXiv:1910.07467.

Least memory traffic, for 2-byte elements: 4 bytes per element forward (8 with the residual), 6 backward.
`norm_kernels` has the kernels and their launchers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zeroshard.kernels.checks import check_alike, check_device, check_floating
from zeroshard.kernels.derivatives import once_differentiable
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import accumulator_dtype, dense_rows_of
from zeroshard.kernels.norm_kernels import norm_backward, norm_forward

MAX_WIDTH = 65536
MOST_VALID = 256  # combinations of shapes, dtypes and devices that are remembered as valid
_valid: set[tuple[Any, ...]] = set()

# ---------------------------------------------------------------------------------------------------- reference


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` without the residual, in PyTorch."""
    if weight is None or weight.dtype == x.dtype:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    bias = None if bias is None else bias.to(wide)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias, eps).to(x.dtype)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`rms_norm` without the residual, in PyTorch."""
    if weight is None or weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide), eps).to(x.dtype)


# ----------------------------------------------------------------------------------------------------- autograd


class _Norm(torch.autograd.Function):
    """x [..., width] -> (y, h), or y alone without a residual; ``centred``: layer_norm, otherwise rms_norm.

    It saves h, not x, and each row's 1 / deviation (with ``centred`` its mean too) in fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None,
        eps: float,
        centred: bool,
    ) -> Any:
        """x, residual [..., width], weight, bias [width] -> y, or y and h = x + residual, both as x."""
        ctx.set_materialize_grads(False)
        rows = dense_rows_of(x)
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        summed = None if residual is None else torch.empty_like(y)
        shape = (2 if centred else 1, x.numel() // x.shape[-1])
        stats = torch.empty(shape, dtype=accumulator_dtype(x.dtype), device=x.device)
        norm_forward(rows, None if residual is None else dense_rows_of(residual), weight, bias, y, summed, stats, eps)
        ctx.save_for_backward(rows if summed is None else summed, weight, stats)
        ctx.has_bias, ctx.shape = bias is not None, x.shape
        return y if summed is None else (y, summed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, d_summed: Tensor | None = None) -> Any:
        """dy, d_summed [..., width], None if unused -> gradients of x, weight, bias and residual, each if needed."""
        x, weight, stats = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        if dy is None:  # y was not used
            return d_summed, None, None, d_summed if needs_residual else None, None, None
        dx = torch.empty(ctx.shape, dtype=x.dtype, device=x.device) if needs_x or needs_residual else None
        needs_bias = ctx.has_bias and needs_bias
        d_weight = d_bias = None
        if weight is not None and (needs_weight or needs_bias):
            d_weight = torch.empty_like(weight)
            d_bias = torch.empty_like(weight) if needs_bias else None
        d_rows = None if d_summed is None else dense_rows_of(d_summed)
        norm_backward(dense_rows_of(dy), d_rows, x, weight, stats, dx, d_weight, d_bias)
        return (
            dx if needs_x else None,
            d_weight if needs_weight else None,
            d_bias,
            dx if needs_residual else None,
            None,
            None,
        )


# ------------------------------------------------------------------------------------------------------- public


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    kernels: Choice | None = None,
) -> Any:
    """``(h - mean(h)) / sqrt(var(h) + eps) * weight + bias`` over the last dimension, h = x or x + residual.

    Statistics are computed in fp32 (fp64 for fp64), from h rounded to x's dtype.

    Args:
        x: [..., width], fp16, bf16, fp32 or fp64, any strides; 1 <= width <= 65536.
        weight: [width], x's dtype or fp32; None: ones.
        bias: [width], weight's dtype, only together with a weight; None: zeros.
        eps: added to the variance.
        residual: x's shape and dtype; None: nothing is added.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Returns:
        y [..., width] in x's dtype; with a residual the pair (y, h), where h is the input of the next residual sum.

    Raises:
        ValueError: an invalid argument; the message begins with its name.

    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    _check(x, weight, bias, residual)
    if choose("layer_norm", x.device, kernels) == "triton":
        return _Norm.apply(x, weight, bias, residual, float(eps), True)
    x = x if residual is None else x + residual
    y = layer_norm_reference(x, weight, bias, eps)
    return y if residual is None else (y, x)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: Tensor | None = None,
    kernels: Choice | None = None,
) -> Any:
    """``h / sqrt(mean(h^2) + eps) * weight`` over the last dimension, h = x or x + residual.

    Arguments, result and errors as `layer_norm`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    _check(x, weight, None, residual)
    if choose("rms_norm", x.device, kernels) == "triton":
        return _Norm.apply(x, weight, None, residual, float(eps), False)
    x = x if residual is None else x + residual
    y = rms_norm_reference(x, weight, eps)
    return y if residual is None else (y, x)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError for arguments that are not as `layer_norm` says; what was valid once is not checked again."""
    if torch.compiler.is_compiling():  # the compiler would guard on all that `_valid` has
        _check_each(x, weight, bias, residual)
        return
    facts = tuple(None if t is None else (t.shape, t.dtype, t.device) for t in (x, weight, bias, residual))
    if facts in _valid:
        return
    _check_each(x, weight, bias, residual)
    if len(_valid) >= MOST_VALID:
        _valid.clear()
    _valid.add(facts)


def _check_each(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> None:
    check_floating("x", x)
    if x.ndim == 0:
        raise ValueError("x: a scalar has no last dimension; give [..., width]")
    width = x.shape[-1]
    if not 1 <= width <= MAX_WIDTH:
        raise ValueError(f"x: width {width} is outside 1..{MAX_WIDTH}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        check_floating(name, vector)
        if vector.shape != (width,):
            raise ValueError(f"{name}: shape {tuple(vector.shape)} is not [{width}], the width of x")
        if vector.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name}: {vector.dtype} is neither x's {x.dtype} nor float32; cast it")
        check_device(name, vector, "x", x)
    if bias is not None:
        if weight is None:
            raise ValueError("bias: there is no weight beside it; give both, or a weight alone")
        check_alike("bias", bias, "weight", weight)
    if residual is not None:
        check_alike("residual", residual, "x", x)
