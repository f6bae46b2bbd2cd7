"""Block-wise quantisation: floating-point numbers as small codes, with one fp32 scale for each block of neighbours.

What travels between ranks may be narrower than what computes. A block of ``block`` neighbours shares a scale,
``max |x| / largest code``, and each element becomes the code nearest to ``x / scale``, or one of the two around it:

    packed   | scale 0 | scale 1 | ... | codes of block 0 | codes of block 1 | ... | to a multiple of 16 bytes
    int8     codes -127 .. 127, a byte each
    int4     codes -7 .. 7, two a byte: the block's first half in the low four bits, its second in the high four
    e4m3     8-bit floating point, largest 448 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433)

With scale s an integer code is off by at most s / 2 rounded to nearest, and by less than s rounded stochastically.
e4m3 keeps four significant bits: by at most 2^-4 of the number itself, 2^-10 s near zero; stochastically by twice as
much. A block that holds a NaN or Inf has a NaN for its scale, so that all of it is NaN when it arrives: nobody
downstream takes clamped garbage for numbers. A scale is never below 2^-126, so what is smaller than half of that is 0.

[Note: Noise]
    Stochastic rounding makes the mean of many roundings the number itself. The noise is a function of a key and of the
    element's place, ``((a j + c) mod 2^32) >> 16`` for element j of a block, whose a and c are a hash of (key, block):
    strongly universal multiply-shift hashing (Dietzfelbinger 1996, "Universal hashing and k-wise independent random
    variables via integer arithmetic without primes"). So each noise is uniform, two of a block are independent, a run
    repeats its bits, on any device and in any order, and it costs one multiplication. It has 16 bits: a mean is off by
    at most 2^-17 s. What a code holds exactly keeps its value.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, section 2.1;
the formats on the wire: Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.kernels.block_kernels import TINY, dequantise_blocks, quantise_blocks
from zeroshard.kernels.checks import check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.wire_formats import BLOCK, LARGEST, SCALE_BYTES, BlockFormat, DtypeFormat, Format

_CHUNK = 1 << 17  # elements that the reference quantises at a time: what a cache holds


# ---------------------------------------------------------------------------------------------------- reference


def quantise_reference(values: Tensor, packed: Tensor, form: BlockFormat, key: int | None = None) -> None:
    """`quantise` in PyTorch, a cache's worth at a time."""
    scales, codes = _parts(packed, values.numel(), form)
    _clear_rest(packed, values.numel(), form)
    whole, step = values.numel() // form.block, max(_CHUNK // form.block, 1)
    wide = form.code_bytes(form.block)
    scratch = torch.empty(1 if key is None else 2, min(step, whole + 1) * form.block, device=values.device)
    noises = None if key is None else _noises(key, len(scales), values.device)
    for first in range(0, whole, step):
        last = min(first + step, whole)
        rows = values[first * form.block : last * form.block].view(-1, form.block)
        code_rows = codes[first * wide : last * wide].view(-1, wide)
        own = None if noises is None else (noises[0][first:last], noises[1][first:last])
        _quantise_rows(rows, scales[first:last], code_rows, form, own, scratch)
    rest = values[whole * form.block :]
    if rest.numel():
        own = None if noises is None else (noises[0][whole:], noises[1][whole:])
        _quantise_rows(rest[None], scales[whole:], codes[None, whole * wide :], form, own, scratch)


def dequantise_reference(packed: Tensor, values: Tensor, form: BlockFormat) -> None:
    """`dequantise` in PyTorch, a cache's worth at a time."""
    parts = _parts(packed, values.numel(), form)
    step = max(_CHUNK // form.block, 1) * form.block
    for start in range(0, values.numel(), step):
        _dequantise_chunk(parts, start, values[start : start + step], form)


def sum_reference(rows: Tensor, own: Tensor, rank: int, target: Tensor, form: Format) -> None:
    """`dequantised_sum` in PyTorch, a cache's worth at a time."""
    numel = own.numel()
    block = form.block if isinstance(form, BlockFormat) else BLOCK
    step = max(_CHUNK // 2 // block, 1) * block
    parts = [_parts(row, numel, form) if isinstance(form, BlockFormat) else row.view(form.dtype) for row in rows]
    scratch = torch.empty(2, min(step, numel), device=own.device)
    for start in range(0, numel, step):
        mine = own[start : start + step]
        total, part = scratch[0, : len(mine)], scratch[1, : len(mine)]
        for index, each in enumerate(parts):
            place = total if index == 0 else part
            if index == rank:
                place = place.copy_(mine) if index == 0 else mine
            elif isinstance(each, Tensor):
                place.copy_(each[start : start + len(mine)])
            elif isinstance(form, BlockFormat):
                _dequantise_chunk(each, start, place, form)
            if index:
                total.add_(place)
        target[start : start + step].copy_(total)


def _dequantise_chunk(parts: tuple[Tensor, Tensor], start: int, values: Tensor, form: BlockFormat) -> None:
    """``values [n]`` become the elements from ``start`` on, which begin a block, and end one or are the last."""
    scales, codes = parts
    wide, first = form.code_bytes(form.block), start // form.block
    whole = values.numel() // form.block
    if whole:
        rows = values[: whole * form.block].view(whole, form.block)
        own = codes[first * wide : (first + whole) * wide].view(whole, wide)
        _dequantise_rows(own, scales[first : first + whole], rows, form)
    rest = values[whole * form.block :]
    if rest.numel():
        last = codes[None, (first + whole) * wide :]
        _dequantise_rows(last, scales[first + whole :], rest[None], form)


def _parts(packed: Tensor, numel: int, form: BlockFormat) -> tuple[Tensor, Tensor]:
    """The scales and the codes of ``packed``."""
    start = SCALE_BYTES * form.num_blocks(numel)
    return packed[:start].view(torch.float32), packed[start : start + form.code_bytes(numel)]


def _clear_rest(packed: Tensor, numel: int, form: BlockFormat) -> None:
    """What pads ``packed`` to whole rows of 16 bytes is zeros."""
    packed[SCALE_BYTES * form.num_blocks(numel) + form.code_bytes(numel) :].zero_()


def _quantise_rows(
    rows: Tensor,
    scales: Tensor,
    codes: Tensor,
    form: BlockFormat,
    noises: tuple[Tensor, Tensor] | None,
    scratch: Tensor,
) -> None:
    """rows [b, w] of any floating dtype -> scales [b] fp32, codes [b, code bytes of w] uint8.

    noises: as `_noises` made them, of these blocks. scratch: a row of at least b w fp32 numbers, with noise a second.
    """
    largest = LARGEST[form.name]
    scaled = scratch[0, : rows.numel()].view(rows.shape)
    rows = rows.float()
    torch.abs(rows, out=scaled)
    torch.amax(scaled, 1, out=scales)
    scales.div_(largest).clamp_(min=TINY)
    scales.add_(scales - scales)  # Inf -> NaN
    torch.mul(rows, scales.reciprocal().nan_to_num_(0.0)[:, None], out=scaled)
    noise = None
    if noises is not None:
        noise = _noise(*noises, scratch[1, : rows.numel()].view(torch.int32).view(rows.shape))
    if form.name == "e4m3":
        rounded = scaled if noise is None else _up_or_down(scaled, noise)
        codes.copy_(rounded.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8))
        codes.masked_fill_(codes == 0x80, 0)  # one zero
        return
    if noise is not None:
        scaled.add_(noise.bitwise_right_shift_(15).bitwise_or_(1), alpha=2.0**-17)  # in (-1/2, 1/2)
    whole = scaled.round_().clamp_(-largest, largest)
    if form.name == "int8":
        codes.view(torch.int8).copy_(whole)
        return
    half = codes.shape[1]
    low, high = whole[:, :half].to(torch.int8), torch.zeros_like(codes, dtype=torch.int8)
    high[:, : whole.shape[1] - half] = whole[:, half:]
    torch.bitwise_or(low.bitwise_and_(15), high.bitwise_left_shift_(4), out=codes.view(torch.int8))


def _dequantise_rows(codes: Tensor, scales: Tensor, rows: Tensor, form: BlockFormat) -> None:
    """codes [b, code bytes of w] uint8, scales [b] -> rows [b, w] of any floating dtype."""
    column = scales[:, None]
    if form.name == "e4m3":
        torch.mul(codes.view(torch.float8_e4m3fn).float(), column, out=rows)
    elif form.name == "int8":
        torch.mul(codes.view(torch.int8), column, out=rows)
    else:
        half, both = codes.shape[1], codes.view(torch.int8)
        torch.mul(both.bitwise_left_shift(4).bitwise_right_shift_(4), column, out=rows[:, :half])
        torch.mul(both.bitwise_right_shift(4)[:, : rows.shape[1] - half], column, out=rows[:, half:])


def _noises(key: int, num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The a and c of each block, [num_blocks] int32: [Note: Noise]."""
    word = torch.arange(num_blocks, device=device) * _signed(0x9E3779B97F4A7C15) + key
    word = (word ^ _shifted(word, 30)) * _signed(0xBF58476D1CE4E5B9)  # splitmix64 (Steele, Lea and Flood, 2014)
    word = (word ^ _shifted(word, 27)) * _signed(0x94D049BB133111EB)
    word = word ^ _shifted(word, 31)
    return word.to(torch.int32), (word >> 32).to(torch.int32)


def _noise(factors: Tensor, terms: Tensor, out: Tensor) -> Tensor:
    """Fill ``out [b, w]`` int32, whose high 16 bits and more are noise, for blocks with these a and c, [b]."""
    places = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    return torch.mul(factors[:, None], places, out=out).add_(terms[:, None])


def _shifted(word: Tensor, bits: int) -> Tensor:
    """A logical shift to the right of signed numbers."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _up_or_down(scaled: Tensor, noise: Tensor) -> Tensor:
    """fp32 numbers up to 448 as numbers of e4m3, up or down at random."""
    bits = scaled.view(torch.int32) + ((noise >> 12) & 0xFFFFF)  # fp32 has 20 bits more of a mantissa
    normal = (bits & ~0xFFFFF).view(torch.float32)
    small = (scaled * 512).add_(noise.bitwise_right_shift_(15).bitwise_or_(1), alpha=2.0**-17).round_() / 512
    return torch.where(scaled.abs() < 2.0**-6, small, normal)


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def quantise(
    values: Tensor, packed: Tensor, form: Format, key: int | None = None, *, kernels: Choice | None = None
) -> None:
    """``packed`` becomes what ``values`` are in a format.

    On the meta device nothing happens. The reference takes a MiB for a moment.

    Args:
        values: ``[n]`` contiguous, fp16, bf16, fp32 or fp64, which is rounded to fp32 first.
        packed: ``[form.num_bytes(n)]`` uint8, aligned to 4 bytes.
        form: the format.
        key: round stochastically, with the noise of this `rounding_key`; None: to the nearest. Block formats alone.
        kernels: who computes it; see `zeroshard.kernels.use_kernels`.

    Raises:
        ValueError: an argument that does not fit, by its name.
    """
    _check(values, packed, form)
    if values.is_meta or not values.numel():
        return
    if isinstance(form, DtypeFormat):
        packed[: values.numel() * form.dtype.itemsize].view(form.dtype).copy_(values)
    elif choose("block_formats", values.device, kernels) == "reference":
        with torch._C._DisableTorchDispatch():
            quantise_reference(values, packed, form, key)
    else:
        _clear_rest(packed, values.numel(), form)
        largest = LARGEST[form.name]
        quantise_blocks(values, packed, form.name, form.block, largest, 0 if key is None else key, key is not None)


@torch.no_grad()
def dequantise(packed: Tensor, values: Tensor, form: Format, *, kernels: Choice | None = None) -> None:
    """``values`` become what `quantise` packed, which is read alone; arguments and errors as there."""
    _check(values, packed, form)
    if values.is_meta or not values.numel():
        return
    if isinstance(form, DtypeFormat):
        values.copy_(packed[: values.numel() * form.dtype.itemsize].view(form.dtype))
    elif choose("block_formats", values.device, kernels) == "reference":
        with torch._C._DisableTorchDispatch():
            dequantise_reference(packed, values, form)
    else:
        dequantise_blocks(packed, values, form.name, form.block)


@torch.no_grad()
def dequantised_sum(
    rows: Tensor, own: Tensor, rank: int, target: Tensor, form: Format, *, kernels: Choice | None = None
) -> None:
    """``target`` becomes the sum, in fp32 and in their order, of packed rows and of ``own`` in the place of one.

    Args:
        rows: ``[world_size, form.num_bytes(n)]`` uint8; row ``rank`` is not read.
        own: ``[n]`` contiguous, any floating dtype.
        rank: its place.
        target: ``[n]``; it may be ``own``.
        form: of the rows.
        kernels: as in `quantise`.

    Raises:
        ValueError: an argument that does not fit, by its name.
    """
    _check(own, rows[rank], form)
    if own.is_meta or not own.numel():
        return
    if own.device.type == "cpu" and choose("block_formats", own.device, kernels) == "reference":
        with torch._C._DisableTorchDispatch():
            sum_reference(rows, own, rank, target, form)
        return
    total = torch.empty_like(own, dtype=torch.float32)
    part = torch.empty_like(total)
    for index, row in enumerate(rows):
        place = total if index == 0 else part
        if index == rank:
            place.copy_(own)
        else:
            dequantise(row, place, form, kernels=kernels)
        if index:
            total.add_(part)
    target.copy_(total)


def _check(values: Tensor, packed: Tensor, form: Format) -> None:
    check_floating("values", values)
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(f"values: shape {tuple(values.shape)}, strides {values.stride()}; give a contiguous [n]")
    num_bytes = form.num_bytes(values.numel())
    if packed.dtype != torch.uint8 or packed.shape != (num_bytes,) or not packed.is_contiguous():
        raise ValueError(f"packed: {packed.dtype} {tuple(packed.shape)}; give a contiguous [{num_bytes}] of uint8")
    if packed.device != values.device:
        raise ValueError(f"packed: on {packed.device}, and values are on {values.device}; move it there")
