"""Block-wise quantisation: floating-point numbers as small codes, with one fp32 scale per block of elements.

Collectives send numbers in these formats to move fewer bytes between ranks. A block of ``block`` consecutive elements
shares a scale, ``max |x| / largest code``. Each element becomes the code nearest to ``x / scale``, or with stochastic
rounding one of the two codes around it:

    packed   | scale 0 | scale 1 | ... | codes of block 0 | codes of block 1 | ... | to a multiple of 16 bytes
    int8     codes -127 .. 127, a byte each
    int4     codes -7 .. 7, two a byte: the block's first half in the low four bits, its second in the high four
    e4m3     8-bit floating point, largest 448 (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433)
    nf4      codes 0 .. 15, two a byte as int4's: 16 quantiles of the normal distribution between -1 and 1, for frozen
             weights; rounded to the nearest only (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3)

Let s be the scale. The error of an integer code is at most s / 2 with rounding to nearest, and less than s with
stochastic rounding. e4m3 keeps four significant bits: its error is at most 2^-4 of the number itself, or 2^-10 s near
zero, and at most twice that with stochastic rounding. A block that contains a NaN or Inf gets NaN as its scale, so that
all of its elements arrive as NaN: no receiver takes clamped garbage for numbers. A scale is never below 2^-126, so
rounding to the nearest integer code turns a magnitude below half of that into 0.

[Note: Noise]
    Stochastic rounding makes the mean of many roundings equal the number itself. The noise is a function of a key and
    of the element's index. A table has the odd multiples of 2^-17 between -1/2 and 1/2, in an order given by a 16-bit
    hash. Element j of block i takes entry ``o_i + j``, modulo the table's length. ``o_i`` is the highest 16 bits of
    ``(a i + c) mod 2^64``, where a and c are hashes of the key: strongly universal multiply-shift hashing
    (Dietzfelbinger 1996, "Universal hashing and k-wise independent random variables via integer arithmetic without
    primes"). So each noise is uniform, and noises of different blocks are independent. Within a block independence is
    approximate, because a table has only 2^16 pairs of entries at a given distance: the probability that two noises are
    below two given numbers is off by at most 0.005 in blocks of 256, and 0.03 in larger ones. A run gives the same bits
    again, on any device and in any order. On a CPU, a block's noise is one copy from a table that fits in a cache. The
    mean is off by at most 2^-17 of the distance between codes, and a number that a code represents exactly keeps its
    value. The three largest entries of either sign are replaced by the fourth largest: so ``x / scale``, which may
    exceed the largest code in its last bits, is not rounded to a code that does not exist.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, section 2.1;
the formats between ranks: Wang et al. 2023, ZeRO++, https://arxiv.org/abs/2306.10209.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.kernels import scale_codes
from zeroshard.kernels.block_kernels import GOLDEN, LARGEST_NOISE, NOISE_HASH, TINY, dequantise_blocks, quantise_blocks
from zeroshard.kernels.checks import check_floating
from zeroshard.kernels.dispatch import Choice, choose
from zeroshard.settings.wire_formats import (
    BLOCK,
    LARGEST,
    MOST_IN_BLOCK,
    SCALE_BYTES,
    WEIGHT_FORMATS,
    BlockFormat,
    DtypeFormat,
    Format,
)

_CHUNK = 1 << 17  # elements that the reference quantises at a time: they fit in a cache
_NUM_NOISES = 1 << 16
_MASK = 2**64 - 1
NF4 = (  # quantiles of the normal distribution, scaled to [-1, 1], with an exact 0: QLoRA, appendix E
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)


# ---------------------------------------------------------------------------------------------------- reference


class _Place(NamedTuple):
    """Blocks of one width that are processed together: index of the first, number of blocks, elements of each."""

    block: int
    count: int
    width: int


def quantise_reference(values: Tensor, packed: Tensor, form: BlockFormat, key: int | None = None) -> None:
    """`quantise` in PyTorch, in pieces that fit in a cache."""
    numel, device = values.numel(), values.device
    scales, codes = _scales_and_codes(packed, numel, form)
    places = _places(numel, form.block, _CHUNK)
    length = places[0].count * places[0].width
    scratch = torch.empty(length if key is None else 2 * length, device=device)
    offsets = None if key is None else _offsets(key, form.num_blocks(numel), device)
    for place in places:
        noise = None if offsets is None else _rows(scratch, length, place)
        if offsets is not None and noise is not None:
            own = offsets if len(places) == 1 else offsets[place.block : place.block + place.count]
            torch.index_select(_noise_table(device)[:, : place.width], 0, own, out=noise)
        rows, scaled = _rows(values, place.block * form.block, place), _rows(scratch, 0, place)
        _quantise_rows(rows, *_parts(scales, codes, form, place), form, noise, scaled)
    _close(packed, scales, numel, form)


def dequantise_reference(packed: Tensor, values: Tensor, form: BlockFormat) -> None:
    """`dequantise` in PyTorch, in pieces that fit in a cache."""
    scales, codes = _scales_and_codes(packed, values.numel(), form, read=True)
    for place in _places(values.numel(), form.block, _CHUNK):
        rows = _rows(values, place.block * form.block, place)
        _dequantise_rows(*_parts(scales, codes, form, place), rows, form)


def sum_reference(rows: Tensor, own: Tensor, rank: int, target: Tensor, form: Format) -> None:
    """`dequantised_sum` in PyTorch, in pieces that fit in a cache."""
    block = form.block if isinstance(form, BlockFormat) else BLOCK
    places = _places(own.numel(), block, _CHUNK // 2)
    length = places[0].count * places[0].width
    scratch = torch.empty((2 if own.dtype == torch.float32 else 3) * length, device=own.device)
    for place in places:
        start = place.block * block
        there, total = _rows(target, start, place), _rows(scratch, 0, place)
        found: Tensor | None = None
        for index in range(len(rows)):
            part = total if found is None else _rows(scratch, length, place)
            if index != rank:
                _received(rows[index], own.numel(), form, place, part)
            elif own.dtype == torch.float32:
                part = _rows(own, start, place)
            else:
                part = _rows(scratch, 2 * length, place).copy_(_rows(own, start, place))
            # `target` may be `own`, so it is written only after all rows have been read.
            last = index == len(rows) - 1 and target.dtype == torch.float32
            found = part if found is None else torch.add(found, part, out=there if last else total)
        if found is not None and found is not there:
            there.copy_(found)


def _received(packed: Tensor, numel: int, form: Format, place: _Place, out: Tensor) -> None:
    """Write the numbers that a packed row has at ``place`` into ``out [count, width]`` fp32."""
    if isinstance(form, BlockFormat):
        _dequantise_rows(*_parts(*_scales_and_codes(packed, numel, form, read=True), form, place), out, form)
    else:
        out.copy_(_rows(packed.view(form.dtype), place.block * BLOCK, place))


def _places(numel: int, block: int, most: int) -> list[_Place]:
    """Split ``numel`` elements into places of at most ``most`` elements, or of one block; the first is the largest."""
    whole, rest = divmod(numel, block)
    step = max(most // block, 1)
    places = [_Place(first, min(step, whole - first), block) for first in range(0, whole, step)]
    return [*places, _Place(whole, 1, rest)] if rest else places


def _rows(flat: Tensor, start: int, place: _Place) -> Tensor:
    """View ``flat [n]`` from element ``start`` on as ``[count, width]``, by one call of torch: slicing takes two."""
    return flat.as_strided((place.count, place.width), (place.width, 1), flat.storage_offset() + start)


def _scales_and_codes(packed: Tensor, numel: int, form: BlockFormat, *, read: bool = False) -> tuple[Tensor, Tensor]:
    """Return scales ``[num_blocks]`` fp32 and codes int8 of a packed tensor: views of it, but scales kept as codes.

    Those are a tensor of its own: read from ``packed`` if ``read``, else to be written there by `_close`.
    """
    head, num_blocks = form.head_bytes(numel), form.num_blocks(numel)
    words, codes = packed.view(torch.float32), packed.view(torch.int8)[head:]
    if not form.double:
        return words[:num_blocks], codes
    scales = torch.empty(num_blocks, device=packed.device)
    if read:
        scale_codes.decode(words[: head // SCALE_BYTES], packed[head + form.code_bytes(numel) :][:num_blocks], scales)
    return scales, codes


def _close(packed: Tensor, scales: Tensor, numel: int, form: BlockFormat) -> None:
    """Write scales that are kept as codes, and zero the bytes that pad ``packed`` to a multiple of 16."""
    head, filled = form.head_bytes(numel), form.head_bytes(numel) + form.code_bytes(numel)
    if form.double:
        codes = packed[filled : filled + len(scales)]
        scale_codes.encode(scales, packed[:head].view(torch.float32), codes)
        filled += len(scales)
    if filled < len(packed):
        packed[filled:].zero_()


def _parts(scales: Tensor, codes: Tensor, form: BlockFormat, place: _Place) -> tuple[Tensor, Tensor]:
    """Return views of what a place has: scales ``[count, 1]`` fp32 and codes ``[count, code bytes of width]`` int8."""
    own = scales.as_strided((place.count, 1), (1, 1), scales.storage_offset() + place.block)
    start = place.block * form.code_bytes(form.block)
    return own, _rows(codes, start, _Place(place.block, place.count, form.code_bytes(place.width)))


def _quantise_rows(
    rows: Tensor, scales: Tensor, codes: Tensor, form: BlockFormat, noise: Tensor | None, scaled: Tensor
) -> None:
    """rows [b, w] of any floating dtype -> scales [b, 1] fp32, codes [b, code bytes of w] int8.

    noise: [b, w] fp32 by [Note: Noise]; None: round to nearest. scaled: scratch memory for b w fp32 numbers.
    """
    largest = LARGEST[form.name]
    rows = rows.float()
    torch.abs(rows, out=scaled)
    torch.amax(scaled, 1, keepdim=True, out=scales)
    # Not by the Python number: torch multiplies a CUDA tensor by that one's reciprocal, whose last bit may differ.
    scales.div_(scales.new_full((), largest)).clamp_(min=TINY)
    scales.add_(scales - scales)  # Inf -> NaN
    torch.mul(rows, scales.reciprocal(), out=scaled)
    if form.name == "e4m3":
        rounded = scaled if noise is None else _up_or_down(scaled, noise)
        codes.copy_(rounded.clamp_(-largest, largest).to(torch.float8_e4m3fn).view(torch.int8))
        codes.masked_fill_(codes == -128, 0)  # -0 becomes +0
        return
    if form.name == "nf4":
        numbers = _nf4_codes(scaled)
    else:
        if noise is not None:
            scaled.add_(noise)
        numbers = scaled.round_()  # never above the largest code: x / scale exceeds it in its last bits at most
    if form.name == "int8":
        codes.copy_(numbers)
        return
    half = codes.shape[1]
    low, high = numbers.to(torch.int8).tensor_split((half,), 1)
    torch.bitwise_and(low, 15, out=codes)
    codes[:, : high.shape[1]].bitwise_or_(high.bitwise_left_shift_(4))


def _dequantise_rows(scales: Tensor, codes: Tensor, rows: Tensor, form: BlockFormat) -> None:
    """scales [b, 1], codes [b, code bytes of w] int8 -> rows [b, w] of any floating dtype."""
    wide = rows if rows.dtype == torch.float32 else torch.empty_like(rows, dtype=torch.float32)
    if form.name == "int4":
        half = codes.shape[1]
        wide[:, :half].copy_(codes.bitwise_left_shift(4).bitwise_right_shift_(4))
        wide[:, half:].copy_(codes.bitwise_right_shift(4)[:, : rows.shape[1] - half])
    elif form.name == "nf4":
        half, (low, high) = codes.shape[1], _nf4_bytes(codes.device)
        flat = codes.view(torch.uint8).int().view(-1)
        wide[:, :half].copy_(low.index_select(0, flat).view(codes.shape))
        wide[:, half:].copy_(high.index_select(0, flat).view(codes.shape)[:, : rows.shape[1] - half])
    else:
        wide.copy_(codes if form.name == "int8" else codes.view(torch.float8_e4m3fn))
    torch.mul(wide, scales, out=rows)


@cache
def nf4_table(device: torch.device) -> Tensor:
    """Return ``[31]`` fp32: the 16 numbers of nf4, then the 15 that lie half-way between two of them."""
    numbers = torch.tensor(NF4, device=device)
    return torch.cat([numbers, (numbers[:-1] + numbers[1:]) / 2])


@cache
def _nf4_bins(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for 65 bins of [-1, 1] how many of nf4's halfway numbers lie in earlier bins, and its own (Inf: none)."""
    halfway = nf4_table(device)[len(NF4) :]
    bins = _bin_of(halfway)
    earlier = (bins < torch.arange(65, device=device)[:, None]).sum(1, dtype=torch.int32)
    return earlier, torch.full((65,), torch.inf, device=device).index_copy_(0, bins.long(), halfway)


@cache
def _nf4_bytes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return for each byte the number of its low and of its high four bits, ``[256]`` fp32 each."""
    byte = torch.arange(256, device=device)
    numbers = nf4_table(device)[: len(NF4)]
    return numbers[byte & 15], numbers[byte >> 4]


def _bin_of(numbers: Tensor) -> Tensor:
    """The bin, 0 to 64, of fp32 numbers between about -1 and 1: bins are narrower than nf4's numbers are apart."""
    return numbers.mul(32).add_(32).clamp_(0, 64).int()


def _nf4_codes(scaled: Tensor) -> Tensor:
    """The codes int32 of the nf4 numbers that are nearest to fp32 numbers, of which NaN get any."""
    earlier, halfway = _nf4_bins(scaled.device)
    bins = _bin_of(scaled.nan_to_num_(0.0)).view(-1)
    codes = earlier.index_select(0, bins)
    codes.add_(scaled.view(-1) > halfway.index_select(0, bins))
    return codes.view(scaled.shape)


@cache
def _noise_table(device: torch.device) -> Tensor:
    """Return ``[2^16, MOST_IN_BLOCK]`` fp32: in row o the noise from entry o on; a view of little over 2^16 numbers."""
    word = torch.arange(_NUM_NOISES, dtype=torch.int64, device=device)
    for factor, bits in NOISE_HASH:  # each step is one to one
        word = word * factor & (_NUM_NOISES - 1)
        word = word ^ word >> bits
    odd = (word * 2 + 1 - _NUM_NOISES).clamp_(-LARGEST_NOISE, LARGEST_NOISE)
    noise = odd.float().mul_(2.0**-17)
    return torch.cat([noise, noise[:MOST_IN_BLOCK]]).as_strided((_NUM_NOISES, MOST_IN_BLOCK), (1, 1))


def _offsets(key: int, num_blocks: int, device: torch.device) -> Tensor:
    """Return ``[num_blocks]`` int64: the entry of the table at which each block's noise begins, see [Note: Noise]."""
    factor, term = _signed(_hash(key)), _signed(_hash(key + GOLDEN & _MASK))
    words = torch.arange(num_blocks, device=device).mul_(factor).add_(term)
    return words.bitwise_right_shift_(48).bitwise_and_(_NUM_NOISES - 1)


def _hash(word: int) -> int:
    """Hash 64 bits to 64 bits, as splitmix64 does (Steele, Lea and Flood, 2014)."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _up_or_down(scaled: Tensor, noise: Tensor) -> Tensor:
    """Round fp32 numbers of magnitude up to 448 to numbers of e4m3, up or down at random."""
    odd = (noise * 2.0**17).to(torch.int32)
    bits = scaled.view(torch.int32) + ((odd & 0x1FFFF) << 3)  # fp32's mantissa has 20 bits more than e4m3's
    normal = (bits & ~0xFFFFF).view(torch.float32)
    small = (scaled * 512).add_(noise).round_() / 512
    return torch.where(scaled.abs() < 2.0**-6, small, normal)


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def quantise(
    values: Tensor, packed: Tensor, form: Format, key: int | None = None, *, kernels: Choice | None = None
) -> None:
    """Write ``values`` into ``packed``, in the format ``form``.

    On the meta device nothing happens. The reference allocates about a MiB temporarily.

    Args:
        values: ``[n]`` contiguous, fp16, bf16, fp32 or fp64; fp64 is rounded to fp32 first.
        packed: output ``[form.num_bytes(n)]`` uint8, aligned to 4 bytes.
        key: key of stochastic rounding, from `zeroshard.settings.wire_formats.rounding_key`; None: round to nearest. A
            `DtypeFormat` always rounds to nearest.
        kernels: backend; see `zeroshard.kernels.use_kernels`.

    Raises:
        ValueError: an invalid argument, or a ``key`` with nf4; the message begins with the argument's name.
    """
    _check(values, packed, form)
    if key is not None and isinstance(form, BlockFormat) and form.name == "nf4":
        raise ValueError("key: nf4 rounds to the nearest code only; leave it out")
    if values.is_meta or not values.numel():
        return
    if isinstance(form, DtypeFormat):
        packed[: values.numel() * form.dtype.itemsize].view(form.dtype).copy_(values)
    elif choose("block_formats", values.device, kernels) == "reference":
        with torch._C._DisableTorchDispatch():
            quantise_reference(values, packed, form, key)
    else:
        scales, codes = _scales_and_codes(packed, values.numel(), form)
        table, largest = _table(form, values.device), LARGEST[form.name]
        noise = 0 if key is None else key, key is not None
        quantise_blocks(values, scales, codes, table, form.name, form.block, largest, *noise)
        _close(packed, scales, values.numel(), form)


@torch.no_grad()
def dequantise(packed: Tensor, values: Tensor, form: Format, *, kernels: Choice | None = None) -> None:
    """Write the numbers that `quantise` packed into ``values``; ``packed`` is only read. Arguments, errors as there."""
    _check(values, packed, form)
    if values.is_meta or not values.numel():
        return
    if isinstance(form, DtypeFormat):
        values.copy_(packed[: values.numel() * form.dtype.itemsize].view(form.dtype))
    elif choose("block_formats", values.device, kernels) == "reference":
        with torch._C._DisableTorchDispatch():
            dequantise_reference(packed, values, form)
    else:
        scales, codes = _scales_and_codes(packed, values.numel(), form, read=True)
        dequantise_blocks(scales, codes, values, _table(form, values.device), form.name, form.block)


@torch.no_grad()
def dequantised_sum(
    rows: Tensor, own: Tensor, rank: int, target: Tensor, form: Format, *, kernels: Choice | None = None
) -> None:
    """Write the sum of packed rows, in fp32 and in their order, into ``target``; ``own`` replaces row ``rank``.

    Args:
        rows: ``[world_size, form.num_bytes(n)]`` uint8; row ``rank`` is not read.
        own: ``[n]`` contiguous, any floating dtype.
        rank: index of the row that ``own`` replaces.
        target: output ``[n]``; may be ``own``.
        kernels: as in `quantise`.

    Raises:
        ValueError: an invalid argument; the message begins with ``values`` for ``own``, with ``packed`` for ``rows``.
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


def _table(form: BlockFormat, device: torch.device) -> Tensor | None:
    if form.name != "nf4":
        return None
    with torch._C._DisableTorchDispatch():
        return nf4_table(device)


def _check(values: Tensor, packed: Tensor, form: Format) -> None:
    check_floating("values", values)
    if values.dim() != 1 or not values.is_contiguous():
        raise ValueError(f"values: shape {tuple(values.shape)}, strides {values.stride()}; give a contiguous [n]")
    if isinstance(form, BlockFormat) and form.name not in WEIGHT_FORMATS:
        raise ValueError(f"form: {form.name!r} has no conversion here; choose one of {', '.join(WEIGHT_FORMATS)}")
    num_bytes = form.num_bytes(values.numel())
    if packed.dtype != torch.uint8 or packed.shape != (num_bytes,) or not packed.is_contiguous():
        raise ValueError(f"packed: {packed.dtype} {tuple(packed.shape)}; give a contiguous [{num_bytes}] of uint8")
    if packed.device != values.device:
        raise ValueError(f"packed: on {packed.device}, and values are on {values.device}; move it there")
