"""Optimizer states in fewer bits, rounded up or down at random: bfloat16, or 8-bit codes with a scale for each block.

[Note: Slow moments]
    A state that changes by less than half of its format's spacing would never change if it were rounded to the nearest
    number. AdamW's second moment, with beta2 = 0.999, moves by at most 2^-10 of itself a step where gradients shrink;
    half a spacing of bfloat16 is 2^-9, of an 8-bit code 2^-6 or more. So states are rounded up or down at random, and
    the mean is right (Zamirai et al. 2020, https://arxiv.org/abs/2010.06192). With gradients of half a block's
    elements a tenth as large from a step on, AdamW's root of v in 8 bits is right within 3 % on average after 5,000
    steps; rounded to the nearest it is 2.7 times too large.

The noise of an element is a hash of its place in the parameter, modulo `PERIOD`, and of the parameter's own count of
steps; each parameter begins elsewhere in that period. So it is the same at each stage and number of ranks and after a
resume, and it is computed once for each step, not once for each parameter. An element meets independent noise in
each step, and so do its neighbours.

The codes are those of `zeroshard.kernels.adamw8bit`, which rounds to the nearest. On a CPU one loop in C++ converts all
states of a unit (`random_rounding.cpp`); elsewhere, and without a compiler, the reference in PyTorch does.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeroshard.kernels import cpu_loops
from zeroshard.kernels.adamw8bit import KNEE, decode_signed, decode_unsigned
from zeroshard.kernels.cpu_loops import PLAIN
from zeroshard.kernels.dispatch import asked_for
from zeroshard.kernels.state_codes import Code

PERIOD = 1 << 14  # elements: the noise of a step fits in a processor's cache; a multiple of every block
NEAREST = 1 << 15  # the noise that rounds to the nearest number
_CHUNK_ON_GPU = 1 << 24
_TINY = 2.0**-126  # the smallest normal fp32, as in `adamw8bit`
_SIGNED, _UNSIGNED = 127 * (1 + KNEE), 256 * (1 + KNEE)


class Noise(NamedTuple):
    """Of the elements of one piece in one step."""

    words: Tensor  # int32 [>= begin + PERIOD], each from 0 to 65535
    begin: int  # of the first element


@lru_cache(maxsize=8)
def nearest(device: torch.device) -> Noise:
    """The noise with which all values are rounded to the nearest number."""
    return Noise(torch.full((PERIOD,), NEAREST, dtype=torch.int32, device=device), 0)


class StepNoise:
    """The noise of one step, which is computed once for all parameters that have the same count of steps."""

    def __init__(self) -> None:
        self._words: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, step: Tensor | float, device: torch.device, offset: int, which: int) -> Noise:
        """The noise of a piece.

        Args:
            step: the parameter's count of steps.
            device: where it is needed.
            offset: the place of the piece's first element, counted from where the parameter begins in the period.
            which: 0 or 1: one of two independent ones.
        """
        if isinstance(step, Tensor) and step.device.type != "cpu":  # whose value the host does not know
            words = _words(step.to(torch.int64), device)
        else:
            key = int(step), device
            words = self._words[key] = self._words[key] if key in self._words else _words(int(step), device)
        return Noise(words[which], offset % PERIOD)


def _words(step: Tensor | int, device: torch.device) -> Tensor:
    """Hashes of places and a step, int32 [2, 2 * PERIOD]: a period twice, so that it may begin anywhere."""
    word = torch.arange(PERIOD, dtype=torch.int32, device=device).mul_(_signed(0x9E3779B1))  # products keep 32 bits
    word.add_(_signed(step * 0x85EBCA77))
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # Wellons 2018, "Prospecting for hash functions"
        word.bitwise_xor_(_shifted(word, shift)).mul_(factor)
    word.bitwise_xor_(_shifted(word, 15))
    return torch.stack([word, word >> 16]).bitwise_and_(0xFFFF).repeat(1, 2)


def _shifted(word: Tensor, shift: int) -> Tensor:
    """The bits of ``word``, moved to the right; torch repeats the sign in their place."""
    return (word >> shift).bitwise_and_((1 << (32 - shift)) - 1)


def _signed(word: Tensor | int) -> Tensor | int:
    """The low 32 bits of an int, or of an int64 tensor, as a signed number."""
    return ((word + 2**31) & 0xFFFFFFFF) - 2**31


def _parts(numel: int, block: int, device: torch.device) -> Iterator[tuple[slice, tuple[int, int, int], int]]:
    """Divide a piece into parts that are computed at once.

    Yields the elements of each, their shape ``(periods, blocks, block)``, and their first block. What the shape does
    not divide follows as a shorter period, then as a shorter block.
    """
    chunk = _chunk(device.type)
    periods, in_blocks = numel // PERIOD * PERIOD, numel // block * block
    for start in range(0, periods, chunk):
        stop = min(start + chunk, periods)
        yield slice(start, stop), ((stop - start) // PERIOD, PERIOD // block, block), start // block
    if in_blocks > periods:
        yield slice(periods, in_blocks), (1, (in_blocks - periods) // block, block), periods // block
    if numel > in_blocks:
        yield slice(in_blocks, numel), (1, 1, numel - in_blocks), in_blocks // block


def _chunk(device_type: str) -> int:
    """Elements of a part: on a CPU so few that one thread computes them, and others are not waited for."""
    return PERIOD if device_type == "cpu" else _CHUNK_ON_GPU


def scratch_bytes(numel: int, device_type: str, *, codes: bool) -> int:
    """Bytes that `encode_states` of a piece allocates at a time, with the noise; ``codes``: in 8 bits."""
    looped = device_type == "cpu" and cpu_loops.loop(LOOP) is not None
    for_each = 0 if looped else 8 if codes else 4 if device_type == "cpu" else 9
    return max(7 * PERIOD * 4, 4 * PERIOD * 4 + for_each * min(numel, _chunk(device_type)))  # 7: while noise is made


def _row(of: Noise, part: slice, shape: tuple[int, int, int]) -> Tensor:
    begin = of.begin + part.start % PERIOD
    return of.words[begin : begin + shape[1] * shape[2]].view(shape[1:])


# ---------------------------------------------------------------------------------------------- reference, in PyTorch


def round_to_bf16(values: Tensor, rounded: Tensor, of: Noise) -> None:
    """Round ``values`` (fp32, contiguous) into ``rounded`` (bf16, as many); NaN and Inf stay so."""
    flat, target = values.view(-1), rounded.view(-1)
    for part, shape, _ in _parts(flat.numel(), PERIOD, flat.device):
        own = flat[part].view(shape)
        bits = torch.add(own.view(torch.int32), _row(of, part, shape)).bitwise_and_(-65536)
        found = bits.view(torch.float32)
        # The bits of a NaN may overflow. A sum tells, sooner than a look at each element; a GPU's host would wait.
        if own.device.type != "cpu" or not math.isfinite(float(own.sum())):
            found = torch.where(own.isfinite(), found, own)
        target[part].view(shape).copy_(found)


def encode(values: Tensor, codes: Tensor, scales: Tensor, of: Noise, block: int, code: Code) -> None:
    """Encode ``values`` (fp32, contiguous, overwritten) as ``codes`` (int8, as many) and ``scales`` (fp32, by block).

    They are not negative, unless ``code`` has a sign. ``block``: a power of two up to `PERIOD`.
    """
    flat, target = values.view(-1), codes.view(-1)
    signed = code is Code.SIGNED
    for part, shape, first in _parts(flat.numel(), block, flat.device):
        own, row = flat[part].view(shape), _row(of, part, shape)
        if code is Code.ROOT:  # by float64, as in `adamw8bit`: MKL's root of fp32 is off by a unit at times
            own.copy_(own.double().sqrt_())
        magnitudes = own.abs() if signed else own
        scale = scales[first : first + shape[0] * shape[1]].view(shape[:2])
        torch.amax(magnitudes, 2, out=scale)
        scale.mul_(KNEE).clamp_(min=_TINY)
        levels = torch.div(own, magnitudes + scale[..., None], out=own).mul_(_SIGNED if signed else _UNSIGNED)
        levels.add_(row, alpha=2.0**-16).floor_()
        levels = levels.clamp_(-127, 127) if signed else levels.sub_(129).clamp_(-128, 127)
        target[part].view(shape).copy_(levels)


def decode(codes: Tensor, scales: Tensor, values: Tensor, block: int, code: Code) -> None:
    """Decode what `encode` encoded to ``values`` (fp32, contiguous, as many)."""
    flat, source = values.view(-1), codes.view(-1)
    decode_each = decode_signed if code is Code.SIGNED else decode_unsigned
    for part, (periods, blocks, width), first in _parts(flat.numel(), block, flat.device):
        rows = (periods * blocks, width)
        own, scratch = flat[part].view(rows), torch.empty(rows, dtype=torch.float32, device=codes.device)
        decode_each(source[part].view(rows), scales[first : first + rows[0]], own, scratch)
        if code is Code.ROOT:
            own.mul_(own)


# ------------------------------------------------------------------------------------------------- loop of a CPU

LOOP = "random_rounding"
NUMEL_OF_THREAD = 65536  # elements for which another thread is worth its start
_KINDS = {None: 0, Code.SIGNED: 1, Code.ROOT: 2, Code.MAGNITUDE: 3}


class State(NamedTuple):
    """A state in both forms: ``values`` (fp32, contiguous), and what it is kept in between steps."""

    values: Tensor
    kept: list[Tensor]  # bf16; or codes (int8) and scales (fp32)
    code: Code | None  # None: bf16
    noise: Noise | None = None  # only to encode


def _address(noise: Noise | None) -> int:
    return 0 if noise is None else noise.words.data_ptr() + 4 * noise.begin


def _looped(states: Sequence[State], block: int, *, encodes: bool) -> bool:
    """Convert states in one call of the loop; False: it does not serve them."""
    tensors = chain.from_iterable((state.values, *state.kept) for state in states)
    if asked_for(None) != "auto" or any(each.device.type != "cpu" or type(each) not in PLAIN for each in tensors):
        return False
    library = cpu_loops.loop(LOOP)
    if library is None:
        return False
    rows = [
        (
            *(state.values.data_ptr(), state.kept[0].data_ptr(), state.kept[-1].data_ptr()),
            *(_address(state.noise), state.values.numel(), _KINDS[state.code]),
        )
        for state in states
    ]
    table, numel = np.array(rows, dtype=np.int64), sum(state.values.numel() for state in states)
    num_threads = min(torch.get_num_threads(), 1 + numel // NUMEL_OF_THREAD)
    sizes = (ctypes.c_int64(each) for each in (len(rows), block, encodes, num_threads))
    library.zeroshard_convert_states(ctypes.c_void_p(table.ctypes.data), *sizes)
    return True


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def encode_states(states: Sequence[State], block: int) -> None:
    """Write each state's values, which are lost, into what it is kept in; at once where there is a loop."""
    if not _looped(states, block, encodes=True):
        for values, kept, code, of in states:
            assert of is not None
            if code is None:
                round_to_bf16(values, *kept, of)
            else:
                encode(values, *kept, of, block, code)


@torch.no_grad()
def decode_states(states: Sequence[State], block: int) -> None:
    """Write each state's values, from what it is kept in."""
    if not _looped(states, block, encodes=False):
        for values, kept, code, _ in states:
            if code is None:
                values.copy_(kept[0])
            else:
                decode(*kept, values, block, code)
