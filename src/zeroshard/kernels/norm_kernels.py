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
REREAD = 16384  # widest row of 2-byte elements whose sums over rows backward keeps in registers, and not the row
REREAD_STRIP = 4096  # columns of it that are processed at a time
PART_BYTES = 2**22  # of x and dy in the rows of a part of the weight gradients, for wider rows: several fit in L2
MAX_PARTS = 512
STRIP = 8192  # columns of a wider row that are processed at a time for dx

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
def _sums_of_strip(
    x, dy, weight_ptr, cols, mean, rstd, CENTRED: tl.constexpr, HAS_WEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Return the sums of g z and, if CENTRED, of g over a strip of a row, of x and dy in their own dtypes."""
    z, g = x.to(ACC), dy.to(ACC)
    if CENTRED:
        z = tl.where(cols < WIDTH, z - mean, 0.0)
    if HAS_WEIGHT:
        g *= tl.load(weight_ptr + cols, mask=cols < WIDTH, other=0.0).to(ACC)
    sum_g = tl.sum(g, axis=0) if CENTRED else rstd
    return tl.sum(g * (z * rstd), axis=0), sum_g


@jit
def _backward_reread(
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, num_rows, dy_stride,
    d_summed_stride, x_stride, CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr, STRIPS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For rows of which registers have room for the sums over rows, and not for x and dy beside them.

    A row is read for its two averages, and again, from L1 or L2, for dx: a strip after each strip of the next row.
    """
    program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    d_weight = ()
    d_bias = ()
    for _ in tl.static_range(STRIPS):
        d_weight = d_weight + (tl.zeros((BLOCK,), ACC),)  # noqa: RUF005 -- Triton has no starred ones
        if NUM_GRADS > 1:
            d_bias = d_bias + (tl.zeros((BLOCK,), ACC),)  # noqa: RUF005
    mean_gz = tl.full([], 0.0, ACC)
    mean_g = tl.full([], 0.0, ACC)
    rstd = tl.load(rstd_ptr + program)
    mean = tl.load(mean_ptr + program) if CENTRED else rstd
    for strip in tl.static_range(STRIPS):
        cols = strip * BLOCK + tl.arange(0, BLOCK)
        x_next = tl.load(x_ptr + program * x_stride + cols, mask=cols < WIDTH, other=0.0)
        dy_next = tl.load(dy_ptr + program * dy_stride + cols, mask=cols < WIDTH, other=0.0)
        sum_gz, sum_g = _sums_of_strip(x_next, dy_next, weight_ptr, cols, mean, rstd, CENTRED, HAS_WEIGHT, WIDTH, ACC)
        mean_gz += sum_gz / WIDTH
        mean_g += sum_g / WIDTH
    for row in range(program, num_rows, num_programs):
        after = row + num_programs
        exists = after < num_rows
        rstd_next = tl.load(rstd_ptr + after, mask=exists, other=0.0)
        mean_next = tl.load(mean_ptr + after, mask=exists, other=0.0) if CENTRED else rstd
        next_gz = tl.full([], 0.0, ACC)
        next_g = tl.full([], 0.0, ACC)
        added_weight = ()
        added_bias = ()
        for strip in tl.static_range(STRIPS):
            cols = strip * BLOCK + tl.arange(0, BLOCK)
            in_row = cols < WIDTH
            x_next = tl.load(x_ptr + after * x_stride + cols, mask=in_row & exists, other=0.0)
            dy_next = tl.load(dy_ptr + after * dy_stride + cols, mask=in_row & exists, other=0.0)
            x = tl.load(x_ptr + row * x_stride + cols, mask=in_row, other=0.0, eviction_policy="evict_first").to(ACC)
            dy = tl.load(dy_ptr + row * dy_stride + cols, mask=in_row, other=0.0, eviction_policy="evict_first").to(ACC)
            z = (x - mean) * rstd if CENTRED else x * rstd
            added_weight = added_weight + (d_weight[strip] + dy * z,)  # noqa: RUF005
            if NUM_GRADS > 1:
                added_bias = added_bias + (d_bias[strip] + dy,)  # noqa: RUF005
            dx = dy
            if HAS_WEIGHT:
                dx = dy * tl.load(weight_ptr + cols, mask=in_row, other=0.0).to(ACC)
            dx = dx - z * mean_gz
            if CENTRED:
                dx -= mean_g
            dx *= rstd
            if HAS_D_SUMMED:
                dx += tl.load(d_summed_ptr + row * d_summed_stride + cols, mask=in_row, other=0.0).to(ACC)
            tl.store(dx_ptr + row * WIDTH + cols, dx.to(dx_ptr.dtype.element_ty), mask=in_row)
            sum_gz, sum_g = _sums_of_strip(
                x_next, dy_next, weight_ptr, cols, mean_next, rstd_next, CENTRED, HAS_WEIGHT, WIDTH, ACC
            )
            next_gz += sum_gz / WIDTH
            next_g += sum_g / WIDTH
        d_weight = added_weight
        d_bias = added_bias
        mean_gz, mean_g, rstd, mean = next_gz, next_g, rstd_next, mean_next
    for strip in tl.static_range(STRIPS):
        cols = strip * BLOCK + tl.arange(0, BLOCK)
        tl.store(parts_ptr + program * WIDTH + cols, d_weight[strip], mask=cols < WIDTH)
        if NUM_GRADS > 1:
            tl.store(parts_ptr + (num_programs + program) * WIDTH + cols, d_bias[strip], mask=cols < WIDTH)


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
    dy_ptr, d_summed_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, parts_ptr, num_rows, num_parts, part_rows,
    dy_stride, d_summed_stride, x_stride, CENTRED: tl.constexpr, HAS_D_SUMMED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, NEEDS_DX: tl.constexpr, NUM_GRADS: tl.constexpr, WIDTH: tl.constexpr,
    STRIP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """For rows too wide for registers. Programs of a group of rows: one for dx of each, then some for their part.

    The programs of a group run at about the same time, so the second ones find x and dy in L2.
    """
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
    tensors = (dy, _or(d_summed, dy), *saved, _or(dx, dy))
    if width <= HELD:
        tile = tile_for(width, numel=2048, per_thread=16)
        # As many programs as fit in a multiprocessor's registers, at 128 (8 warps and more) to 160 registers a thread.
        most = num_multiprocessors(x.device) * {16: 1, 8: 2, 4: 3}.get(tile.num_warps, 6)
        num_parts = min(-(-num_rows // tile.rows), most)
        parts = torch.empty(num_grads, num_parts, width, dtype=rstd.dtype, device=x.device)
        _backward_held[(num_parts,)](
            *tensors, parts if num_grads else rstd, num_rows, *strides, **common, **flags, NEEDS_DX=dx is not None,
            NUM_GRADS=num_grads, ROWS=tile.rows, BLOCK=tile.block, num_warps=tile.num_warps,
            num_stages=1,  # the kernel prefetches itself
        )  # fmt: skip
    elif width <= REREAD and x.element_size() == 2 and dx is not None and num_grads > 0:
        num_parts = min(num_rows, num_multiprocessors(x.device))
        parts = torch.empty(num_grads, num_parts, width, dtype=rstd.dtype, device=x.device)
        _backward_reread[(num_parts,)](
            *tensors, parts, num_rows, *strides, **common, **flags, NUM_GRADS=num_grads,
            STRIPS=-(-width // REREAD_STRIP), BLOCK=REREAD_STRIP, num_warps=16, num_stages=1,
        )  # fmt: skip
    else:
        part_rows = max(1, PART_BYTES // (2 * width * x.element_size()), -(-num_rows // MAX_PARTS))
        num_parts = -(-num_rows // part_rows)
        num_programs = (part_rows if dx is not None else 0) + (-(-width // 1024) if num_grads else 0)
        parts = torch.empty(num_grads, num_parts, width, dtype=rstd.dtype, device=x.device)
        _backward_wide[(num_parts * num_programs,)](
            *tensors, parts if num_grads else rstd, num_rows, num_parts, part_rows, *strides, **common, **flags,
            NEEDS_DX=dx is not None, NUM_GRADS=num_grads, STRIP=STRIP, ROWS=4, BLOCK=1024, num_warps=16,
        )  # fmt: skip
    if grads is not None:
        _add_parts[(-(-width // 64), num_grads)](parts, grads, num_parts, WIDTH=width, ROWS=32, BLOCK=64, ACC=acc)


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor
