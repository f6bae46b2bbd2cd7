"""Rotary position embeddings (RoPE) of queries and keys together, in one launch.

    (a, b) -> (a cos - b sin, b cos + a sin)        for each pair (a, b) = (x_i, x_(i + D / 2)) of a head

The gradient is the rotation by the opposite angle. A program processes one position: it loads the angles once and
rotates all heads. RoFormer, Su et al. 2021, arXiv:2104.09864; the pairs are those of Hugging Face's LLaMA.

Shape legend: B batch, H query heads, K key heads, T sequence, D width of a head.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from zeroshard.kernels.checks import check_device, check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.kernels.launch import PreparedKernel, accumulator, jit, next_power_of_2, opaque, tl

# ---------------------------------------------------------------------------------------------------- reference


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + D / 2) of a head by its position's angle: [B, H, T, D] -> [B, H, T, D].

    The products are computed in the wider of the two dtypes; the result has ``x``'s.
    """
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _turn(
    x_ptr, y_ptr, cos, sin, pairs, x_head, x_last, y_head, y_last, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    for start in range(0, HEADS, BLOCK_HEADS):
        heads = (start + tl.arange(0, BLOCK_HEADS)).to(tl.int64)
        mask = (heads < HEADS)[:, None] & (pairs < HALF)[None, :]
        x_ptrs = x_ptr + heads[:, None] * x_head + pairs[None, :] * x_last
        y_ptrs = y_ptr + heads[:, None] * y_head + pairs[None, :] * y_last
        first = tl.load(x_ptrs, mask=mask, other=0.0).to(ACC)
        second = tl.load(x_ptrs + HALF * x_last, mask=mask, other=0.0).to(ACC)
        dtype = y_ptr.dtype.element_ty
        tl.store(y_ptrs, (first * cos[None, :] - second * sin[None, :]).to(dtype), mask=mask)
        tl.store(y_ptrs + HALF * y_last, (second * cos[None, :] + first * sin[None, :]).to(dtype), mask=mask)


@jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, num_positions, cos_stride, sin_stride, q_batch, q_head,
    q_position, q_last, k_batch, k_head, k_position, k_last, q_out_batch, q_out_head, q_out_position, q_out_last,
    k_out_batch, k_out_head, k_out_position, k_out_last, BACK: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, HALF: tl.constexpr, Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // num_positions).to(tl.int64)
    position = (tl.program_id(0) % num_positions).to(tl.int64)
    pairs = tl.arange(0, BLOCK)
    cos = tl.load(cos_ptr + position * cos_stride + pairs, mask=pairs < HALF, other=0.0).to(ACC)
    sin = tl.load(sin_ptr + position * sin_stride + pairs, mask=pairs < HALF, other=0.0).to(ACC)
    if BACK:
        sin = -sin
    q_ptr += batch * q_batch + position * q_position
    q_out_ptr += batch * q_out_batch + position * q_out_position
    _turn(q_ptr, q_out_ptr, cos, sin, pairs, q_head, q_last, q_out_head, q_out_last, Q_HEADS, HALF, Q_BLOCK, ACC)
    k_ptr += batch * k_batch + position * k_position
    k_out_ptr += batch * k_out_batch + position * k_out_position
    _turn(k_ptr, k_out_ptr, cos, sin, pairs, k_head, k_last, k_out_head, k_out_last, K_HEADS, HALF, K_BLOCK, ACC)


# ---------------------------------------------------------------------------------------------------- launchers


@lru_cache(maxsize=256)
def _prepared(
    q_heads: int, k_heads: int, width: int, back: bool, dtype: torch.dtype, *angles: torch.dtype
) -> PreparedKernel:
    """Return the kernel for queries and keys of ``dtype`` and cosines and sines of ``angles``."""
    block = next_power_of_2(width // 2)
    q_block, k_block = (min(next_power_of_2(max(1, n)), max(1, 2048 // block)) for n in (q_heads, k_heads))
    return PreparedKernel(
        _rope_kernel, BACK=back, Q_HEADS=q_heads, K_HEADS=k_heads, HALF=width // 2, Q_BLOCK=q_block, K_BLOCK=k_block,
        BLOCK=block, ACC=accumulator(dtype), num_warps=max(1, min(4, q_block * block // 256)),
    )  # fmt: skip


@opaque("rope", "q_out", "k_out")
def _rope(q: Tensor, k: Tensor, q_out: Tensor, k_out: Tensor, cos: Tensor, sin: Tensor, back: bool) -> None:
    """q, q_out [B, H, T, D], k, k_out [B, K, T, D] of one dtype, any strides; cos, sin [T, D / 2]."""
    num_batch, q_heads, num_positions, width = q.shape
    if q.numel() + k.numel() == 0:
        return
    tensors = (q, k, q_out, k_out, cos, sin)
    strides = (cos.stride(0), sin.stride(0), *q.stride(), *k.stride(), *q_out.stride(), *k_out.stride())
    prepared = _prepared(q_heads, k.shape[1], width, back, q.dtype, cos.dtype, sin.dtype)
    prepared.launch((num_batch * num_positions, 1, 1), tensors, (num_positions, *strides))


# ----------------------------------------------------------------------------------------------------- autograd


class _Rope(torch.autograd.Function):
    """Rotates q [B, H, T, D] and k [B, K, T, D] by the angles of cos and sin [T, D / 2]; backward rotates back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, H, T, D] and k [B, K, T, D], any strides -> both rotated, in their dtypes; cos, sin [T, D / 2]."""
        cos, sin = _angles(cos), _angles(sin)
        q_out, k_out = torch.empty_like(q), torch.empty_like(k)
        _rope(q, k, q_out, k_out, cos, sin, False)
        ctx.save_for_backward(cos, sin)
        return q_out, k_out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> Any:
        """Gradients of the rotated q and k -> of q and k, in the same shapes: rotated by the negative angles."""
        cos, sin = ctx.saved_tensors
        dq_out, dk_out = torch.empty_like(dq), torch.empty_like(dk)
        _rope(dq, dk, dq_out, dk_out, cos, sin, True)
        return dq_out, dk_out, None, None


def _angles(table: Tensor) -> Tensor:
    return table if table.stride(-1) == 1 else table.contiguous()


# ------------------------------------------------------------------------------------------------------- public


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, kernels: Choice | None = None) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + D / 2) of every head of ``q`` and ``k`` by its position's angle.

    Args:
        q: queries [B, H, T, D], fp16, bf16, fp32 or fp64, any strides, D even.
        k: keys [B, K, T, D], q's dtype.
        cos: cosines of the angles [T, D / 2], floating.
        sin: sines of the angles [T, D / 2], floating.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Returns:
        The rotated queries and keys, in their own dtype; the products are computed in fp32 (fp64 for fp64).

    Raises:
        ValueError: an invalid argument; the message begins with its name.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    _check(q, k, cos, sin)
    if choose("rope", q.device, kernels) == "reference":
        return rotate(q, cos, sin), rotate(k, cos, sin)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: triton computes no gradient of the angles; detach it, or use reference")
    return _Rope.apply(q, k, cos, sin)


def _check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        check_floating(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name}: shape {tuple(x.shape)} is not [batch, heads, positions, width of a head]")
    if q.shape[-1] == 0 or q.shape[-1] % 2:
        raise ValueError(f"q: a head of width {q.shape[-1]} has no pairs; give an even width")
    if (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        raise ValueError(f"k: shape {tuple(k.shape)} differs from q's {tuple(q.shape)} in more than the heads")
    if k.dtype != q.dtype:
        raise ValueError(f"k: {k.dtype} is not q's {q.dtype}; cast one of them")
    check_device("k", k, "q", q)
    for name, table in (("cos", cos), ("sin", sin)):
        check_floating(name, table)
        if table.shape != (q.shape[2], q.shape[3] // 2):
            raise ValueError(f"{name}: shape {tuple(table.shape)} is not [{q.shape[2]}, {q.shape[3] // 2}]")
        check_device(name, table, "q", q)
