"""The Triton kernels of `norm` and their launchers; `norm` has the formulas.

A row is read once and kept in registers; in backward one that is too wide for that is read again from L2. Weight
gradients: each persistent program sums over its rows in registers and writes one row of partial sums; a second kernel
adds these rows in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zeroshard.kernels.launch import accumulator, jit, next_power_of_2, num_multiprocessors, opaque, tl

HELD = 8192  # widest row that backward keeps in registers, with its gradient and their sums
STRIP = 8192  # columns of a wider row that are processed at a time

# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, mean_ptr, rstd_ptr, num_rows, x_stride,
    residual_stride, CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + rows[:, None] * residual_stride + cols[None, :], mask=mask, other=0.0)
        summed = (x + residual.to(ACC)).to(summed_ptr.dtype.element_ty)  # the rounded sum is returned and normalised
        tl.store(summed_ptr + rows[:, None] * WIDTH + cols[None, :], summed, mask=mask)
        x = summed.to(ACC)
    if CENTRED:
        mean = tl.sum(x, axis=1) / WIDTH
        tl.store(mean_ptr + rows, mean, mask=rows < num_rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / WIDTH + EPS)
    tl.store(rstd_ptr + rows, rstd, mask=rows < num_rows)
    y = x * rstd[:, None]
    if HAS_WEIGHT:
        y *= tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)[None, :]
    if HAS_BIAS:
        y += tl.load(bias_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)[None, :]
    tl.store(y_ptr + rows[:, None] * WIDTH + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@jit
def _load_rows(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, rows, cols, mask, num_rows, x_stride, dy_stride, CENTRED: tl.constexpr
):
    """Load x and dy [ROWS, BLOCK], mean and rstd [ROWS] in their own dtypes; zeros past the last row."""
    x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)
    mean = tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0) if CENTRED else rstd
    return x, dy, mean, rstd


@jit
def _backward_held(
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, num_rows, dy_stride,
    d_summed_stride, x_stride, CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    in_row = (cols < WIDTH)[None, :]
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)[None, :]
    if NUM_GRADS > 0:
        d_weight = tl.zeros((ROWS, BLOCK), ACC)
    if NUM_GRADS > 1:
        d_bias = tl.zeros((ROWS, BLOCK), ACC)
    # Prefetch the next tile while this one is processed: otherwise a program would alternate between loads and sums.
    rows = program * ROWS + tl.arange(0, ROWS)
    mask = (rows < num_rows)[:, None] & in_row
    x_next, dy_next, mean_next, rstd_next = _load_rows(
        x_ptr, dy_ptr, mean_ptr, rstd_ptr, rows, cols, mask, num_rows, x_stride, dy_stride, CENTRED
    )
    for tile in range(program, tl.cdiv(num_rows, ROWS), num_programs):
        x, dy, rstd, mean = x_next.to(ACC), dy_next.to(ACC), rstd_next[:, None], mean_next[:, None]
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & in_row
        if HAS_D_SUMMED:
            d_summed = tl.load(d_summed_ptr + rows[:, None] * d_summed_stride + cols[None, :], mask=mask, other=0.0)
        after = rows + num_programs * ROWS
        mask_after = (after < num_rows)[:, None] & in_row
        x_next, dy_next, mean_next, rstd_next = _load_rows(
            x_ptr, dy_ptr, mean_ptr, rstd_ptr, after, cols, mask_after, num_rows, x_stride, dy_stride, CENTRED
        )

        z = (x - mean) * rstd if CENTRED else x * rstd
        if NEEDS_DX:
            g = dy * weight if HAS_WEIGHT else dy
            dx = g - z * (tl.sum(g * z, axis=1) / WIDTH)[:, None]
            if CENTRED:
                dx -= (tl.sum(g, axis=1) / WIDTH)[:, None]
            dx *= rstd
            if HAS_D_SUMMED:
                dx += d_summed.to(ACC)
            tl.store(dx_ptr + rows[:, None] * WIDTH + cols[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
        if NUM_GRADS > 0:
            d_weight += dy * z
        if NUM_GRADS > 1:
            d_bias += dy
    parts_ptr += program * WIDTH + cols
    if NUM_GRADS > 0:
        tl.store(parts_ptr, tl.sum(d_weight, axis=0), mask=cols < WIDTH)
    if NUM_GRADS > 1:
        tl.store(parts_ptr + num_programs.to(tl.int64) * WIDTH, tl.sum(d_bias, axis=0), mask=cols < WIDTH)


@jit
def _load_strip(
    dy_ptr, x_ptr, weight_ptr, row, dy_stride, x_stride, cols, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Load a strip of a row: the gradient of the normalised x, which is dy times the weight, and x."""
    g = tl.load(dy_ptr + row * dy_stride + cols, mask=cols < WIDTH, other=0.0).to(ACC)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < WIDTH, other=0.0).to(ACC)
    if HAS_WEIGHT:
        g *= tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)
    return g, x


@jit
def _backward_strips(
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dy_stride, d_summed_stride, x_stride,
    CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    rstd = tl.load(rstd_ptr + row)
    mean = tl.load(mean_ptr + row) if CENTRED else tl.full([], 0.0, ACC)
    sum_gz = tl.full([], 0.0, ACC)
    sum_g = tl.full([], 0.0, ACC)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        g, x = _load_strip(dy_ptr, x_ptr, weight_ptr, row, dy_stride, x_stride, cols, HAS_WEIGHT, WIDTH, ACC)
        sum_gz += tl.sum(g * ((x - mean) * rstd), axis=0)
        sum_g += tl.sum(g, axis=0)
    for start in range(0, WIDTH, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        g, x = _load_strip(dy_ptr, x_ptr, weight_ptr, row, dy_stride, x_stride, cols, HAS_WEIGHT, WIDTH, ACC)
        dx = g - (x - mean) * rstd * (sum_gz / WIDTH)
        if CENTRED:
            dx -= sum_g / WIDTH
        dx *= rstd
        if HAS_D_SUMMED:
            dx += tl.load(d_summed_ptr + row * d_summed_stride + cols, mask=cols < WIDTH, other=0.0).to(ACC)
        tl.store(dx_ptr + row * WIDTH + cols, dx.to(dx_ptr.dtype.element_ty), mask=cols < WIDTH)


@jit
def _partial_grads(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, parts_ptr, num_rows, dy_stride, x_stride, CENTRED: tl.constexpr,
    NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Partial weight gradients for rows too wide for registers: programs split the columns, and alternate in rows."""
    program = tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(1)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d_weight = tl.zeros((ROWS, BLOCK), ACC)
    d_bias = tl.zeros((ROWS, BLOCK), ACC)
    for tile in range(program, tl.cdiv(num_rows, ROWS), num_programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (cols < WIDTH)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        if CENTRED:
            x -= tl.load(mean_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        d_weight += dy * (x * tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None])
        d_bias += dy
    parts_ptr += program * WIDTH + cols
    tl.store(parts_ptr, tl.sum(d_weight, axis=0), mask=cols < WIDTH)
    if NUM_GRADS > 1:
        tl.store(parts_ptr + num_programs.to(tl.int64) * WIDTH, tl.sum(d_bias, axis=0), mask=cols < WIDTH)


@jit
def _add_parts(
    parts_ptr, grads_ptr, num_parts, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """grads[i] = sum over p of parts[i, p], in the order of p."""
    grad = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(0, num_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < num_parts)[:, None] & (cols < WIDTH)[None, :]
        total += tl.load(parts_ptr + (grad * num_parts + rows[:, None]) * WIDTH + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0).to(grads_ptr.dtype.element_ty)
    tl.store(grads_ptr + grad * WIDTH + cols, total, mask=cols < WIDTH)


# ---------------------------------------------------------------------------------------------------- launchers


@dataclass(frozen=True)
class Tile:
    """What one program processes at a time: ``rows`` x ``block`` elements, by ``num_warps`` warps."""

    rows: int
    block: int
    num_warps: int


def tile_for(width: int, numel: int, per_thread: int) -> Tile:
    """Return the tile for complete rows of ``width`` in registers, with about ``per_thread`` elements in a thread.

    A program takes several narrow rows, about ``numel`` elements, to keep as many bytes in flight as with wide rows.
    """
    block = max(16, next_power_of_2(width))
    rows = max(1, min(64, numel // block))
    return Tile(rows, block, max(1, min(16, rows * block // (32 * per_thread))))


@opaque("norm_forward", "y", "summed", "mean", "rstd")
def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    eps: float,
) -> None:
    """x, residual [rows, width] with strided rows; y, summed contiguous; mean (None: rms_norm) and rstd [rows]."""
    num_rows, width = x.shape
    if num_rows == 0:
        return
    flags = {
        "CENTRED": mean is not None,
        "HAS_RESIDUAL": residual is not None,
        "HAS_WEIGHT": weight is not None,
        "HAS_BIAS": bias is not None,
        "EPS": eps,
        "WIDTH": width,
        "ACC": accumulator(x.dtype),
    }
    # The pointer of an absent tensor is never read: any valid pointer replaces it.
    tensors = (x, _or(residual, x), _or(weight, x), _or(bias, x), y, _or(summed, y), _or(mean, rstd), rstd)
    strides = (x.stride(0), _or(residual, x).stride(0))
    tile = tile_for(width, numel=4096, per_thread=32)
    grid = (-(-num_rows // tile.rows),)
    _forward[grid](*tensors, num_rows, *strides, **flags, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps)


@opaque("norm_backward", "dx", "grads")
def norm_backward(
    dy: Tensor,
    d_summed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dx: Tensor | None,
    grads: Tensor | None,
) -> None:
    """dy, d_summed, x [rows, width] with strided rows; dx contiguous; grads [1 or 2, width]: of weight, of bias."""
    num_rows, width = x.shape
    if num_rows == 0:
        if grads is not None:
            grads.zero_()
        return
    num_grads = 0 if grads is None else grads.shape[0]
    acc = accumulator(x.dtype)
    saved = (x, _or(weight, x), _or(mean, rstd), rstd)
    common = {"CENTRED": mean is not None, "WIDTH": width, "ACC": acc}
    flags = {"HAS_D_SUMMED": d_summed is not None, "HAS_WEIGHT": weight is not None}
    strides = (dy.stride(0), _or(d_summed, dy).stride(0), x.stride(0))
    multiprocessors = num_multiprocessors(x.device)
    held = width <= HELD
    tile = tile_for(width, numel=2048, per_thread=16) if held else Tile(4, 1024, 8)
    # As many programs as fit in a multiprocessor's registers, at 128 (8 warps and more) to 160 registers per thread.
    num_parts = min(-(-num_rows // tile.rows), multiprocessors * {16: 1, 8: 2, 4: 3}.get(tile.num_warps, 6))
    parts = torch.empty(num_grads, num_parts, width, dtype=rstd.dtype, device=x.device)
    shapes = {"NUM_GRADS": num_grads, "ROWS": tile.rows, "BLOCK": tile.block, "num_warps": tile.num_warps}
    if held:
        shapes |= {"NEEDS_DX": dx is not None, "num_stages": 1}  # the kernel prefetches itself
        tensors = (dy, _or(d_summed, dy), *saved, _or(dx, dy), parts if num_grads else rstd)
        _backward_held[(num_parts,)](*tensors, num_rows, *strides, **common, **flags, **shapes)
    elif dx is not None:
        tensors = (dy, _or(d_summed, dy), *saved, dx)
        _backward_strips[(num_rows,)](*tensors, *strides, **common, **flags, BLOCK=STRIP, num_warps=16)
    if grads is None:
        return
    if not held:
        tensors, strides = (dy, x, _or(mean, rstd), rstd, parts), (dy.stride(0), x.stride(0))
        _partial_grads[(-(-width // tile.block), num_parts)](*tensors, num_rows, *strides, **common, **shapes)
    _add_parts[(-(-width // 64), num_grads)](parts, grads, num_parts, WIDTH=width, ROWS=32, BLOCK=64, ACC=acc)


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor
