"""The Triton kernels of `norm` and their launchers; `norm` has the formulas.

A row is read once and kept in registers; in backward, rows that are too wide for that are read several times within a
short time, so all but the first come from L2. Weight gradients: programs sum over some rows each and write partial
sums; a second kernel adds these in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels.launch import (
    PreparedKernel,
    accumulator,
    jit,
    next_power_of_2,
    num_multiprocessors,
    opaque,
    row_stride,
    tl,
)

HELD = 8192  # widest row that backward keeps in registers, with its gradient and their sums
STRIP = 8192  # columns of a wider row that are processed at a time for dx
PART_BYTES = 2**22  # of x and dy in the rows of one part of the weight gradients of wider rows: several parts fit in L2
MAX_PARTS = 512  # bounds the memory of the parts

# ------------------------------------------------------------------------------------------------------ kernels


@jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, summed_ptr, stats_ptr, num_rows, x_stride, residual_stride,
    CENTRED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    rstd_ptr, mean_ptr = stats_ptr, stats_ptr + num_rows
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
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, parts_ptr, num_rows, dy_stride,
    d_summed_stride, x_stride, CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NEEDS_DX: tl.constexpr, NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    rstd_ptr, mean_ptr = stats_ptr, stats_ptr + num_rows
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
def _write_dx(
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, row, dy_stride, d_summed_stride, x_stride,
    CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write dx of one row, strip by strip, which needs all of its strips before."""
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
def _write_part(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, parts_ptr, part, num_parts, cols, first, end, dy_stride, x_stride,
    CENTRED: tl.constexpr, NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Write some columns of a part of the weight gradients: their sums over the rows from ``first`` to ``end``."""
    d_weight = tl.zeros((ROWS, BLOCK), ACC)
    d_bias = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(first, end, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < end)[:, None] & (cols < WIDTH)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        x = tl.load(x_ptr + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(ACC)
        if CENTRED:
            x -= tl.load(mean_ptr + rows, mask=rows < end, other=0.0)[:, None]
        d_weight += dy * (x * tl.load(rstd_ptr + rows, mask=rows < end, other=0.0)[:, None])
        d_bias += dy
    tl.store(parts_ptr + part * WIDTH + cols, tl.sum(d_weight, axis=0), mask=cols < WIDTH)
    if NUM_GRADS > 1:
        tl.store(parts_ptr + (num_parts + part) * WIDTH + cols, tl.sum(d_bias, axis=0), mask=cols < WIDTH)


@jit
def _backward_wide(
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, stats_ptr, dx_ptr, parts_ptr, num_rows, num_parts, part_rows,
    dy_stride, d_summed_stride, x_stride, CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For rows too wide for registers. Programs of a group of rows: one for dx of each, then some for their part.

    The programs of a group run at about the same time, so the second ones find x and dy in L2.
    """
    rstd_ptr, mean_ptr = stats_ptr, stats_ptr + num_rows
    num_dx = part_rows if NEEDS_DX else 0
    num_programs = num_dx + (tl.cdiv(WIDTH, BLOCK) if NUM_GRADS > 0 else 0)
    program = tl.program_id(0).to(tl.int64)
    part, job = program // num_programs, program % num_programs
    first = part * part_rows
    if job < num_dx:
        if first + job < num_rows:
            _write_dx(
                dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, first + job, dy_stride,
                d_summed_stride, x_stride, CENTRED, HAS_D_SUMMED, HAS_WEIGHT, WIDTH, STRIP, ACC,
            )  # fmt: skip
    elif NUM_GRADS > 0:
        cols = (job - num_dx) * BLOCK + tl.arange(0, BLOCK)
        end = tl.minimum(first + part_rows, num_rows)
        _write_part(
            dy_ptr, x_ptr, mean_ptr, rstd_ptr, parts_ptr, part, num_parts, cols, first, end, dy_stride, x_stride,
            CENTRED, NUM_GRADS, WIDTH, ROWS, BLOCK, ACC,
        )  # fmt: skip


@jit
def _add_parts(
    parts_ptr, d_weight_ptr, d_bias_ptr, num_parts, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Write d_weight, and d_bias in the programs whose second index is 1: sum over p of parts[i, p], in p's order."""
    index = tl.program_id(1).to(tl.int64)
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((ROWS, BLOCK), ACC)
    for start in range(0, num_parts, ROWS):
        rows = start + tl.arange(0, ROWS)
        mask = (rows < num_parts)[:, None] & (cols < WIDTH)[None, :]
        total += tl.load(parts_ptr + (index * num_parts + rows[:, None]) * WIDTH + cols[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0).to(d_weight_ptr.dtype.element_ty)
    if index == 0:
        tl.store(d_weight_ptr + cols, total, mask=cols < WIDTH)
    else:
        tl.store(d_bias_ptr + cols, total, mask=cols < WIDTH)


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


@lru_cache(maxsize=256)
def _prepared_forward(
    width: int, dtypes: tuple[torch.dtype, ...], centred: bool, residual: bool, weight: bool, bias: bool, eps: float
) -> tuple[PreparedKernel, int]:
    """Return the kernel, and the rows that a program of it takes; tensors have ``dtypes``: x, and the weight or x."""
    tile = tile_for(width, numel=4096, per_thread=32)
    kernel = PreparedKernel(
        _forward, CENTRED=centred, HAS_RESIDUAL=residual, HAS_WEIGHT=weight, HAS_BIAS=bias, EPS=eps, WIDTH=width,
        ROWS=tile.rows, BLOCK=tile.block, ACC=accumulator(dtypes[0]), num_warps=tile.num_warps,
    )  # fmt: skip
    return kernel, tile.rows


@opaque("norm_forward", "y", "summed", "stats")
def norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    stats: Tensor,
    eps: float,
) -> None:
    """x, residual as `dense_rows_of` returns them; y, summed contiguous; stats [1 or 2, rows]: 1 / deviation, mean.

    One row of stats is rms_norm, two are layer_norm. residual, y and summed have x's dtype, bias has weight's.
    """
    num_rows = stats.shape[1]
    if num_rows == 0:
        return
    vector = _or(weight, x)
    kernel, rows = _prepared_forward(
        x.shape[-1], (x.dtype, vector.dtype), len(stats) == 2, residual is not None, weight is not None,
        bias is not None, eps,
    )  # fmt: skip
    # The pointer of an absent tensor is never read: any valid pointer replaces it.
    tensors = (x, _or(residual, x), vector, _or(bias, vector), y, _or(summed, y), stats)
    kernel.launch((-(-num_rows // rows), 1, 1), tensors, (num_rows, row_stride(x), row_stride(tensors[1])))


@lru_cache(maxsize=256)
def _prepared_backward(
    width: int, dtypes: tuple[torch.dtype, ...], centred: bool, d_summed: bool, weight: bool, dx: bool, num_grads: int
) -> tuple[PreparedKernel, Tile]:
    """Return the kernel and its tile; tensors have ``dtypes``: x, and those of `norm_backward` that are not x's."""
    tile = tile_for(width, numel=2048, per_thread=16)
    kernel = PreparedKernel(
        _backward_held, CENTRED=centred, HAS_D_SUMMED=d_summed, HAS_WEIGHT=weight, NEEDS_DX=dx, NUM_GRADS=num_grads,
        WIDTH=width, ROWS=tile.rows, BLOCK=tile.block, ACC=accumulator(dtypes[0]), num_warps=tile.num_warps,
        num_stages=1,  # the kernel prefetches itself
    )  # fmt: skip
    return kernel, tile


@lru_cache(maxsize=256)
def _prepared_sum(width: int, dtypes: tuple[torch.dtype, ...]) -> PreparedKernel:
    """Return the kernel that adds parts of weight gradients; ``dtypes``: x's and the weight's."""
    return PreparedKernel(_add_parts, WIDTH=width, ROWS=32, BLOCK=64, ACC=accumulator(dtypes[0]))


@opaque("norm_backward", "dx", "d_weight", "d_bias")
def norm_backward(
    dy: Tensor,
    d_summed: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    stats: Tensor,
    dx: Tensor | None,
    d_weight: Tensor | None,
    d_bias: Tensor | None,
) -> None:
    """dy, d_summed, x as `dense_rows_of` returns them, stats as in `norm_forward`; dx, d_weight, d_bias contiguous.

    dx has x's dtype. d_bias is given only together with d_weight, and both have weight's dtype.
    """
    num_rows, width = stats.shape[1], x.shape[-1]
    if num_rows == 0:
        for grad in (d_weight, d_bias):
            if grad is not None:
                grad.zero_()
        return
    num_grads = int(d_weight is not None) + int(d_bias is not None)
    centred, vector, d_h = len(stats) == 2, _or(weight, x), _or(d_summed, dy)
    tensors = (dy, d_h, x, vector, stats, _or(dx, dy))
    strides = (row_stride(dy), row_stride(d_h), row_stride(x))
    if width <= HELD:
        dtypes = (x.dtype, dy.dtype, d_h.dtype, vector.dtype)
        kernel, tile = _prepared_backward(
            width, dtypes, centred, d_summed is not None, weight is not None, dx is not None, num_grads
        )
        # As many programs as fit in a multiprocessor's registers, at 128 (8 warps and more) to 160 registers a thread.
        most = num_multiprocessors(x.device) * {16: 1, 8: 2, 4: 3}.get(tile.num_warps, 6)
        num_parts = min(-(-num_rows // tile.rows), most)
        parts = torch.empty(num_grads, num_parts, width, dtype=stats.dtype, device=x.device) if num_grads else stats
        kernel.launch((num_parts, 1, 1), (*tensors, parts), (num_rows, *strides))
    else:
        flags = {"HAS_D_SUMMED": d_summed is not None, "HAS_WEIGHT": weight is not None, "CENTRED": centred}
        shapes = {"WIDTH": width, "NUM_GRADS": num_grads, "ACC": accumulator(x.dtype)}
        parts, num_parts = _launch_wide(tensors, strides, num_rows, dx is not None, {**flags, **shapes})
    if d_weight is not None:
        grid = (-(-width // 64), num_grads, 1)
        added = _prepared_sum(width, (x.dtype, d_weight.dtype))
        added.launch(grid, (parts, d_weight, _or(d_bias, d_weight)), (num_parts,))


def _launch_wide(
    tensors: tuple[Tensor, ...], strides: tuple[int, ...], num_rows: int, needs_dx: bool, constants: dict[str, Any]
) -> tuple[Tensor, int]:
    """Launch the kernel for rows wider than `HELD`; return parts of the weight gradients, and how many there are."""
    x, stats = tensors[2], tensors[4]
    num_grads, width = constants["NUM_GRADS"], constants["WIDTH"]
    part_rows = max(1, PART_BYTES // (2 * width * x.element_size()), -(-num_rows // MAX_PARTS))
    num_parts = -(-num_rows // part_rows)
    parts = torch.empty(num_grads, num_parts, width, dtype=stats.dtype, device=x.device) if num_grads else stats
    num_programs = (part_rows if needs_dx else 0) + (-(-width // 1024) if num_grads else 0)
    _backward_wide[(num_parts * num_programs,)](
        *tensors, parts, num_rows, num_parts, part_rows, *strides, **constants, NEEDS_DX=needs_dx, STRIP=STRIP,
        ROWS=4, BLOCK=1024, num_warps=16,
    )  # fmt: skip
    return parts, num_parts


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor
