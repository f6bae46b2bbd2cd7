"""The Triton kernel of `zeroshard.kernels.adamw8bit`, whose reference is its specification, bit for bit.

A program updates some blocks of a piece, which it reads and writes once: 16 bytes an element for fp32 weights, 12 for
bf16 with corrections. One launch updates pieces that lie anywhere in memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zeroshard.kernels.block_noise import block_noise
from zeroshard.kernels.launch import jit, tl

KNEE = 0.0625  # K of the companding function
TILE = 1024  # elements of a program, which has at least one block; four of each array in a thread
FROM_SIGNED, SIGNED = 1 / (127 * (1 + KNEE)), 127 * (1 + KNEE)
FROM_UNSIGNED, UNSIGNED = 1 / (256 * (1 + KNEE)), 256 * (1 + KNEE)


@jit
def _next_scale(values, KNEE: tl.constexpr):
    """The scale [ROWS] of values [ROWS, BLOCK]: their largest, or NaN if one is; zeros where there are none."""
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(tl.float32, bitcast=True)
    scale = largest * KNEE
    return tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)


@jit
def _rounded(x):
    return (x + 12582912.0) - 12582912.0  # to an integer, halves to even: |x| < 2^22


@jit
def _adamw8bit_kernel(
    table_ptr, programs_ptr, numbers_ptr, noise_ptr, PARAM: tl.constexpr, GRAD: tl.constexpr, IS_BF16: tl.constexpr,
    CORRECTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, KNEE: tl.constexpr, FROM_SIGNED: tl.constexpr,
    SIGNED: tl.constexpr, FROM_UNSIGNED: tl.constexpr, UNSIGNED: tl.constexpr,
):  # fmt: skip
    piece = tl.load(programs_ptr + 2 * tl.program_id(0))
    rows = tl.load(programs_ptr + 2 * tl.program_id(0) + 1) + tl.arange(0, ROWS)
    # A row of the table: addresses of parameter, gradient, codes and scales of m and of r, correction; the size,
    # and which row of the noise.
    table_ptr += piece * 9
    param_ptr = tl.load(table_ptr).to(tl.pointer_type(PARAM))
    grad_ptr = tl.load(table_ptr + 1).to(tl.pointer_type(GRAD))
    m_ptr = tl.load(table_ptr + 2).to(tl.pointer_type(tl.int8))
    m_scales_ptr = tl.load(table_ptr + 3).to(tl.pointer_type(tl.float32))
    r_ptr = tl.load(table_ptr + 4).to(tl.pointer_type(tl.int8))
    r_scales_ptr = tl.load(table_ptr + 5).to(tl.pointer_type(tl.float32))
    correction_ptr = tl.load(table_ptr + 6).to(tl.pointer_type(tl.int8))
    numel = tl.load(table_ptr + 7)
    numbers_ptr += piece * 7
    beta1, rest1 = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    beta2, rest2 = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3)
    eps, step_size, decay = tl.load(numbers_ptr + 4), tl.load(numbers_ptr + 5), tl.load(numbers_ptr + 6)

    offsets = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask, is_block = offsets < numel, rows * BLOCK < numel
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    coded = tl.load(m_ptr + offsets, mask=mask, other=0).to(tl.float32) * FROM_SIGNED
    scale = tl.load(m_scales_ptr + rows, mask=is_block, other=0.0)[:, None]
    m = tl.div_rn(coded * scale, 1.0 - tl.abs(coded)) * beta1 + grad * rest1
    level = (tl.load(r_ptr + offsets, mask=mask, other=0).to(tl.float32) + 129.0) * FROM_UNSIGNED
    scale = tl.load(r_scales_ptr + rows, mask=is_block, other=0.0)[:, None]
    r = tl.div_rn(level * scale, 1.0 - level)
    r = tl.where(mask, tl.sqrt_rn(r * r * beta2 + grad * grad * rest2), 0.0)
    change = tl.div_rn(m, r + eps) * step_size
    if IS_BF16:  # as 16 bits of fp32
        bits = tl.load(param_ptr + offsets, mask=mask, other=0).to(tl.int32) << 16
        if CORRECTS:
            bits += tl.load(correction_ptr + offsets, mask=mask, other=0).to(tl.int32) << 8
        value = bits.to(tl.float32, bitcast=True) * decay - change
        bits = value.to(tl.int32, bitcast=True)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        high = tl.where(value == value, high, 0x7FC00000)
        tl.store(param_ptr + offsets, (high >> 16).to(tl.int16), mask=mask)
        if CORRECTS:
            rest = tl.minimum((bits - high + 128) >> 8, 127)
            tl.store(correction_ptr + offsets, rest.to(tl.int8), mask=mask)
    else:
        value = tl.load(param_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * decay - change
        tl.store(param_ptr + offsets, value.to(PARAM), mask=mask)

    scale = _next_scale(m, KNEE)
    tl.store(m_scales_ptr + rows, scale, mask=is_block)
    codes = _rounded(tl.div_rn(m, tl.abs(m) + scale[:, None]) * SIGNED)
    tl.store(m_ptr + offsets, codes.to(tl.int32).to(tl.int8), mask=mask)
    scale = _next_scale(r, KNEE)
    tl.store(r_scales_ptr + rows, scale, mask=is_block)
    noise = tl.load(noise_ptr + tl.load(table_ptr + 8) * BLOCK + tl.arange(0, BLOCK))[None, :]
    levels = tl.floor(tl.div_rn(r, r + scale[:, None]) * UNSIGNED + noise) - 129.0
    levels = tl.where(levels < -128.0, -128.0, tl.where(levels > 127.0, 127.0, levels))
    tl.store(r_ptr + offsets, levels.to(tl.int32).to(tl.int8), mask=mask)


# ---------------------------------------------------------------------------------------------------- launchers


def dtypes() -> dict[torch.dtype, object]:
    """Return the dtypes that the kernel takes, for parameters and for gradients, as Triton's."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch(rows: Sequence[Sequence[Tensor | None]], steps: Sequence[int], numbers: np.ndarray, block: int) -> None:
    """Update pieces of one dtype, with gradients of one dtype, on the current device, which is theirs.

    Args:
        rows: parameter, gradient, and what `zeroshard.kernels.adamw8bit.Codes` has, of each piece.
        numbers: fp32 [pieces, 7]: beta1, 1 - beta1, beta2, 1 - beta2, eps, step size, decay.
    """
    param, grad, *_, correction = rows[0]
    assert param is not None
    assert grad is not None
    per_program = max(TILE // block, 1)  # blocks
    numels = [row[0].numel() for row in rows if row[0] is not None]
    counts = [-(-numel // (block * per_program)) for numel in numels]
    programs = np.empty((sum(counts), 2), dtype=np.int64)
    if not len(programs):
        return
    programs[:, 0] = np.repeat(np.arange(len(rows)), counts)
    programs[:, 1] = np.concatenate([np.arange(count) for count in counts]) * per_program
    addresses = [[0 if tensor is None else tensor.data_ptr() for tensor in row] for row in rows]
    row_of = {step: row for row, step in enumerate(dict.fromkeys(steps))}
    noise = np.stack([block_noise(step, block) for step in row_of])
    table = [[*each, numel, row_of[step]] for each, numel, step in zip(addresses, numels, steps, strict=True)]
    kinds, is_bf16 = dtypes(), param.dtype == torch.bfloat16
    _adamw8bit_kernel[(len(programs),)](
        *(_to_device(array, param.device) for array in (np.array(table, dtype=np.int64), programs, numbers, noise)),
        PARAM=tl.int16 if is_bf16 else kinds[param.dtype], GRAD=kinds[grad.dtype], IS_BF16=is_bf16,
        CORRECTS=correction is not None, BLOCK=block, ROWS=per_program, KNEE=KNEE, FROM_SIGNED=FROM_SIGNED,
        SIGNED=SIGNED, FROM_UNSIGNED=FROM_UNSIGNED, UNSIGNED=UNSIGNED,
        num_warps=min(max(TILE, block) // 128, 16), enable_fp_fusion=False,
    )  # fmt: skip


def _to_device(array: np.ndarray, device: torch.device) -> Tensor:
    table = torch.from_numpy(array)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
