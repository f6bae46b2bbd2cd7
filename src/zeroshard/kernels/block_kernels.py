"""Triton kernels of `zeroshard.kernels.block_formats`, whose reference is their specification, bit for bit.

A program processes `ROWS` blocks. It loads a block as two halves, because int4 packs an element of each half into one
byte. A block is read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.kernels.launch import jit, next_power_of_2, opaque, tl

TINY = 2.0**-126  # the smallest scale: the reciprocal of a smaller one would be infinite
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
NOISE_HASH = ((0x9E37, 8), (0x88B5, 7), (0xDB2D, 9))  # steps of the 16-bit hash: factor, and bits of the shift after it
LARGEST_NOISE = 2**16 - 7  # in units of 2^-17
TILE = 2048  # elements of a program, which has at least one block


@jit
def _nearest_whole(x):
    return (x + 12582912.0) - 12582912.0  # adding 1.5 x 2^23 rounds to an integer, halves to even, for |x| < 2^22


@jit
def _hash(word):
    """Hash 64 bits to 64 bits, as `block_formats` does."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB
    return word ^ (word >> 31)


@jit
def _noise(rows, places, key):
    """Return the noise [ROWS, HALF], odd int32 in units of 2^-17; see [Note: Noise] in `block_formats`."""
    factor, term = _hash(key.to(tl.uint64)), _hash(key.to(tl.uint64) + 0x9E3779B97F4A7C15)
    starts = ((rows.to(tl.uint64) * factor + term) >> 48).to(tl.uint32)
    word = (starts[:, None] + places.to(tl.uint32)) & 0xFFFF
    word = (word * 0x9E37) & 0xFFFF  # NOISE_HASH
    word = ((word ^ (word >> 8)) * 0x88B5) & 0xFFFF
    word = ((word ^ (word >> 7)) * 0xDB2D) & 0xFFFF
    odd = ((word ^ (word >> 9)) * 2).to(tl.int32) - 65535
    return tl.minimum(tl.maximum(odd, -65529), 65529)


@jit
def _to_e4m3(x, noise, STOCHASTIC: tl.constexpr):
    """Round fp32 numbers to e4m3 and return the bytes."""
    bits = x.to(tl.int32, bitcast=True)
    small = x * 512.0
    if STOCHASTIC:
        bits = bits + ((noise & 0x1FFFF) << 3)
        small = small + noise.to(tl.float32) * 0.00000762939453125  # 2^-17
    else:
        bits = bits + 0x7FFFF + ((bits >> 20) & 1)
    normal = (bits & -0x100000).to(tl.float32, bitcast=True)
    value = tl.where(tl.abs(x) < 0.015625, _nearest_whole(small) * 0.001953125, normal)
    value = tl.minimum(tl.maximum(value, -448.0), 448.0) * 7.52316384526264e-37  # 2^-120: fp32's exponent less e4m3's
    bits = value.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    return (((bits >> 20) & 0x7F) | sign).to(tl.uint8)


@jit
def _codes(x, inverse, noise, largest, E4M3: tl.constexpr, STOCHASTIC: tl.constexpr):
    x = x * inverse[:, None]
    if E4M3:
        return _to_e4m3(x, noise, STOCHASTIC)
    if STOCHASTIC:
        x = x + noise.to(tl.float32) * 0.00000762939453125
    return _nearest_whole(x).to(tl.int32).to(tl.uint8, bitcast=False)


@jit
def _nf4_codes(x, inverse, table_ptr):
    """The codes of the nearest numbers: how many of the 15 numbers half-way between two lie below."""
    x = x * inverse[:, None]
    code = (x > tl.load(table_ptr + 16)).to(tl.uint8)
    for place in tl.static_range(17, 31):
        code += (x > tl.load(table_ptr + place)).to(tl.uint8)
    return code


@jit
def _quantise_kernel(
    values_ptr, scales_ptr, codes_ptr, table_ptr, numel, num_blocks, key, largest, BLOCK: tl.constexpr,
    HALF: tl.constexpr, ROWS: tl.constexpr, INT4: tl.constexpr, E4M3: tl.constexpr, NF4: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width = tl.minimum(numel - rows * BLOCK, BLOCK).to(tl.int32)[:, None]  # 32 bits, as all that follows
    half = (width + 1) // 2
    low = tl.arange(0, HALF)[None, :] + width * 0
    high = low + half
    has_low, has_high = low < half, (low < half) & (high < width)
    starts = values_ptr + (rows * BLOCK)[:, None]
    x = tl.load(starts + low, mask=has_low, other=0.0).to(tl.float32)
    y = tl.load(starts + high, mask=has_high, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 1), tl.max(tl.abs(y), 1))
    finite = (tl.abs(x) <= 3.4028234663852886e38) & (tl.abs(y) <= 3.4028234663852886e38)
    bad = tl.min(finite.to(tl.int32), 1) == 0
    scale = tl.maximum(tl.div_rn(most, most * 0.0 + largest), 1.1754943508222875e-38)
    scale = tl.where(bad, float("nan"), scale)
    inverse = tl.where(bad, 0.0, tl.div_rn(scale * 0.0 + 1.0, scale))
    tl.store(scales_ptr + rows, scale, mask=rows < num_blocks)
    noise_low = _noise(rows, low, key) if STOCHASTIC else low
    noise_high = _noise(rows, high, key) if STOCHASTIC else high
    x = tl.where(bad[:, None], 0.0, x)
    y = tl.where(bad[:, None], 0.0, y)
    if NF4:
        first = _nf4_codes(x, inverse, table_ptr)
        second = _nf4_codes(y, inverse, table_ptr)
    else:
        first = _codes(x, inverse, noise_low, largest, E4M3, STOCHASTIC)
        second = _codes(y, inverse, noise_high, largest, E4M3, STOCHASTIC)
    if INT4 or NF4:
        second = tl.where(has_high, second, second * 0)
        tl.store(codes_ptr + (rows * (BLOCK // 2))[:, None] + low, (first & 15) | (second << 4), mask=has_low)
    else:
        places = codes_ptr + (rows * BLOCK)[:, None]
        tl.store(places + low, first, mask=has_low)
        tl.store(places + high, second, mask=has_high)


@jit
def _number(code, scale, E4M3: tl.constexpr):
    if E4M3:
        wide = code.to(tl.int32)
        bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36 * scale[:, None]  # 2^120
    return code.to(tl.int8, bitcast=True).to(tl.float32) * scale[:, None]


@jit
def _dequantise_kernel(
    scales_ptr, codes_ptr, values_ptr, table_ptr, numel, num_blocks, BLOCK: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, INT4: tl.constexpr, E4M3: tl.constexpr, NF4: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    width = tl.minimum(numel - rows * BLOCK, BLOCK).to(tl.int32)[:, None]  # 32 bits, as all that follows
    half = (width + 1) // 2
    low = tl.arange(0, HALF)[None, :] + width * 0
    high = low + half
    has_low, has_high = low < half, (low < half) & (high < width)
    scale = tl.load(scales_ptr + rows, mask=rows < num_blocks, other=0.0)
    places = values_ptr + (rows * BLOCK)[:, None]
    dtype: tl.constexpr = values_ptr.dtype.element_ty
    if NF4:
        both = tl.load(codes_ptr + (rows * (BLOCK // 2))[:, None] + low, mask=has_low, other=0).to(tl.int32)
        tl.store(places + low, (tl.load(table_ptr + (both & 15)) * scale[:, None]).to(dtype), mask=has_low)
        tl.store(places + high, (tl.load(table_ptr + (both >> 4)) * scale[:, None]).to(dtype), mask=has_high)
    else:
        if INT4:
            both = tl.load(codes_ptr + (rows * (BLOCK // 2))[:, None] + low, mask=has_low, other=0).to(tl.int32)
            first = ((both << 28) >> 28).to(tl.uint8)
            second = ((both << 24) >> 28).to(tl.uint8)
        else:
            first = tl.load(codes_ptr + (rows * BLOCK)[:, None] + low, mask=has_low, other=0)
            second = tl.load(codes_ptr + (rows * BLOCK)[:, None] + high, mask=has_high, other=0)
        tl.store(places + low, _number(first, scale, E4M3).to(dtype), mask=has_low)
        tl.store(places + high, _number(second, scale, E4M3).to(dtype), mask=has_high)


# ---------------------------------------------------------------------------------------------------- launchers


def _shape(numel: int, block: int) -> tuple[int, int, int]:
    """Return the number of blocks, half a block's elements (rounded up to a power of two), and blocks of a program."""
    half = next_power_of_2(block // 2)
    return -(-numel // block), half, max(TILE // (2 * half), 1)


@opaque("quantise_blocks", "scales", "codes")
def quantise_blocks(
    values: Tensor, scales: Tensor, codes: Tensor, table: Tensor | None, name: str, block: int, largest: float,
    key: int, stochastic: bool,
) -> None:  # fmt: skip
    """values [n], scales [num_blocks] fp32, codes int8; ``table``: nf4's numbers; ``key``: if ``stochastic``."""
    num_blocks, half, rows = _shape(values.numel(), block)
    _quantise_kernel[(-(-num_blocks // rows),)](
        values, scales, codes.view(torch.uint8), scales if table is None else table, values.numel(), num_blocks,
        key or 2**62, largest, BLOCK=block, HALF=half, ROWS=rows, INT4=name == "int4", E4M3=name == "e4m3",
        NF4=name == "nf4", STOCHASTIC=stochastic, enable_fp_fusion=False,
    )  # fmt: skip


@opaque("dequantise_blocks", "values")
def dequantise_blocks(
    scales: Tensor, codes: Tensor, values: Tensor, table: Tensor | None, name: str, block: int
) -> None:
    """values [n], the others as in `quantise_blocks`."""
    num_blocks, half, rows = _shape(values.numel(), block)
    _dequantise_kernel[(-(-num_blocks // rows),)](
        scales, codes.view(torch.uint8), values, scales if table is None else table, values.numel(), num_blocks,
        BLOCK=block, HALF=half, ROWS=rows, INT4=name == "int4", E4M3=name == "e4m3", NF4=name == "nf4",
        enable_fp_fusion=False,
    )  # fmt: skip
