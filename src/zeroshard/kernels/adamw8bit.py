"""AdamW with 8-bit states in blocks: each block of a piece is decoded, updated and encoded again, in fp32.

    m = decode(m codes),  r = decode(r codes)                (r is the root of the second moment, v = r^2)
    m = beta1 m + (1 - beta1) g
    r = sqrt(beta2 r^2 + (1 - beta2) g^2)
    p = (1 - lr weight_decay) p - lr / (1 - beta1^t) * m / (r / sqrt(1 - beta2^t) + eps)
    m codes, r codes = encode(m), encode(r)     (r: up or down at random, see `block_noise`)

A state takes one byte an element and one fp32 scale a block. The code is companded by the function that
``y = (1 + K) x / (x + K)`` is, for ``x`` in [0, 1] of the block's largest absolute value and K = 1/16: FlashOptim
(arXiv:2602.23349) has K = 1 for m, and none for r. Codes of m are signed, and 0 is the value 0. Codes of r have no
zero: code c, from -128 to 127, is the level (c + 129) / 256. A second moment that is rounded to zero while m is not
makes a step of m / eps, which is thousands of times too long; bitsandbytes' map (arXiv:2110.02861) has that zero.

Each operation below is one that IEEE 754 rounds once (sums, products, quotients, roots), so the result has the same
bits however a piece is cut into chunks of whole blocks, on any number of threads. The reference makes some fifty passes
over a chunk. On a CPU one loop of ``adamw8bit.cpp`` (`zeroshard.kernels.cpu_loops`) does the same operations in one
pass, for all pieces of a call, and on a GPU one Triton kernel (`zeroshard.kernels.adamw8bit_kernels`).

With ``correction`` a parameter is in bf16 and 8 further bits of it are in a state: `joined` makes the fp32 value of
both, `split` rounds to 24 bits and makes the two of it. 2 + 1 bytes do the work of fp32 master weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, sqrt
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from zeroshard.kernels import cpu_loops
from zeroshard.kernels.adamw8bit_kernels import KNEE, launch
from zeroshard.kernels.block_noise import block_noise
from zeroshard.kernels.cpu_loops import PLAIN
from zeroshard.kernels.dispatch import Backend, Choice, asked_for, choose
from zeroshard.kernels.launch import device_of

SERVED = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of weights; they are computed in fp32
_TINY = 2.0**-126  # the smallest normal fp32: scales are at least as large, so that no quotient is 0 / 0
_SIGNED = 127 * (1 + KNEE)
_UNSIGNED = 256 * (1 + KNEE)
CHUNK = 16384  # elements that a CPU updates at a time: their fp32 values fit in the second-level cache
CHUNK_ON_GPU = 1 << 22  # many, because each of some 50 operations is a launch


@dataclass(frozen=True)
class AdamWOptions:
    """Hyper-parameters of one update.

    Raises:
        ValueError: one of them is outside its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and isfinite(value) and value >= 0):
                raise ValueError(f"{name}: {value!r} is not a finite number >= 0")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 <= value < 1):
                raise ValueError(f"{name}: {value!r} is outside [0, 1)")


def chunk_numel(device_type: str) -> int:
    """Return how many elements are updated at a time; the result does not depend on it."""
    return CHUNK if device_type == "cpu" else CHUNK_ON_GPU


def encode_signed(values: Tensor, codes: Tensor, scales: Tensor, scratch: Tensor) -> None:
    """Encode ``values [blocks, block]``, any sign, as ``codes`` (int8, its shape) and ``scales [blocks]``.

    A decoded value is within 6.7 % if it is the block's largest, 1.6 % at a tenth of it, 3 % at a hundredth; half of
    that without a sign. It keeps its sign.
    ``scratch``: fp32, as values; values are overwritten.
    """
    torch.abs(values, out=scratch)
    _scale(scratch, scales)
    scratch.add_(scales[:, None])
    codes.copy_(values.div_(scratch).mul_(_SIGNED).round_())


def encode_unsigned(
    values: Tensor, codes: Tensor, scales: Tensor, scratch: Tensor, noise: Tensor | float = 0.5
) -> None:
    """Encode ``values [blocks, block]`` >= 0 as ``codes`` (int8): none decodes to zero. See `encode_signed`.

    ``noise``: what is added before a code is rounded down, from 0 to below 1, ``[block]``; 0.5: to the nearest.
    """
    _scale(values, scales)
    torch.add(values, scales[:, None], out=scratch)
    levels = torch.div(values, scratch, out=scratch).mul_(_UNSIGNED).add_(noise).floor_()
    # from -128 on: a conversion to int8 is vectorised, one to uint8 is not
    codes.copy_(levels.sub_(129).clamp_(-128, 127))


def _scale(magnitudes: Tensor, scales: Tensor) -> None:
    torch.amax(magnitudes, 1, out=scales)
    scales.mul_(KNEE).clamp_(min=_TINY)


def decode_signed(codes: Tensor, scales: Tensor, values: Tensor, scratch: Tensor) -> None:
    """Decode ``codes [blocks, block]`` and ``scales [blocks]`` to ``values`` (fp32); ``scratch``: as values."""
    values.copy_(codes).mul_(1 / _SIGNED)
    torch.abs(values, out=scratch).neg_().add_(1)
    values.mul_(scales[:, None]).div_(scratch)


def decode_unsigned(codes: Tensor, scales: Tensor, values: Tensor, scratch: Tensor) -> None:
    """Decode what `encode_unsigned` encoded."""
    values.copy_(codes).add_(129).mul_(1 / _UNSIGNED)
    torch.neg(values, out=scratch).add_(1)
    values.mul_(scales[:, None]).div_(scratch)


def joined(weights: Tensor, correction: Tensor) -> Tensor:
    """Return the fp32 values of ``weights`` (bf16) and the 8 bits after them, ``correction`` (int8): a new tensor."""
    high = weights.view(torch.int16).to(torch.int32)
    return high.bitwise_left_shift_(16).add_(correction.to(torch.int32).bitwise_left_shift_(8)).view(torch.float32)


def split(values: Tensor, weights: Tensor, correction: Tensor) -> None:
    """Round fp32 ``values`` to 24 bits: the nearest bf16 in ``weights``, the difference in ``correction`` (int8).

    The bits of floats of one sign are in the order of their values, so the difference is one of integers. It is in
    [-128, 128], and 128, of a tie that went down, becomes 127: half a unit of the 24 bits more.
    """
    weights.copy_(values)
    rest = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    torch.sub(values.view(torch.int32), rest, out=rest)
    correction.copy_(rest.add_(128).bitwise_right_shift_(8).clamp_(-128, 127))


class Codes(NamedTuple):
    """The states of one piece; those of one element a block are rounded up for a last block that is shorter."""

    m: Tensor  # codes, int8, as many as the piece has elements, contiguous
    m_scales: Tensor  # fp32, one for each block
    r: Tensor
    r_scales: Tensor
    correction: Tensor | None = None  # int8, as many as codes, for a piece in bf16; None: there is none


@torch.no_grad()
def adamw8bit_reference(
    param: Tensor, grad: Tensor, states: Codes, step: int, options: AdamWOptions, block: int
) -> None:
    """`adamw8bit` of one piece, in PyTorch, chunk by chunk."""
    flat, grads = param.view(-1), grad.reshape(-1)
    codes = [states.m.view(-1), states.r.view(-1)]
    chunk = max(chunk_numel(flat.device.type) // block, 1) * block
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        rows = slice(start // block, -(-stop // block))
        whole = start + (stop - start) // block * block
        for first, last in ((start, whole), (whole, stop)):  # blocks, and a shorter one at the piece's end
            if first == last:
                continue
            width = min(block, last - first)
            own = slice(rows.start, rows.start + (last - first) // width)
            rows = slice(own.stop, rows.stop)
            two_d = [each[first:last].view(-1, width) for each in codes]
            correction = None if states.correction is None else states.correction.view(-1)[first:last].view(-1, width)
            part = Codes(two_d[0], states.m_scales[own], two_d[1], states.r_scales[own], correction)
            _update(flat[first:last].view(-1, width), grads[first:last].view(-1, width), part, step, options, block)


def _update(param: Tensor, grad: Tensor, states: Codes, step: int, options: AdamWOptions, block: int) -> None:
    """As `adamw8bit_reference`, of ``[blocks, block]``, or of the one shorter block at a piece's end."""
    beta1, beta2 = options.beta1, options.beta2
    root = sqrt(1 - beta2**step)
    grad = grad.float()
    noise = torch.tensor(block_noise(step, block)[: param.shape[1]], device=param.device)
    m, r, scratch = torch.empty((3, *param.shape), dtype=torch.float32, device=param.device)
    decode_signed(states.m, states.m_scales, m, scratch)
    m.mul_(beta1).add_(torch.mul(grad, 1 - beta1, out=scratch))
    decode_unsigned(states.r, states.r_scales, r, scratch)
    r.mul_(r).mul_(beta2).add_(torch.mul(grad, grad, out=scratch).mul_(1 - beta2))
    # MKL's root of fp32 is off by a unit at times. That of float64 is near enough that fp32's nearest is the right one.
    r.copy_(r.double().sqrt_())
    torch.add(r, options.eps * root, out=scratch)
    torch.div(m, scratch, out=scratch).mul_(options.lr * root / (1 - beta1**step))
    if states.correction is not None:
        value = joined(param, states.correction)
        split(value.mul_(1 - options.lr * options.weight_decay).sub_(scratch), param, states.correction)
    elif param.dtype == torch.float32:
        param.mul_(1 - options.lr * options.weight_decay).sub_(scratch)
    else:
        param.copy_(param.float().mul_(1 - options.lr * options.weight_decay).sub_(scratch))
    encode_signed(m, states.m, states.m_scales, scratch)
    encode_unsigned(r, states.r, states.r_scales, scratch, noise)


# ---------------------------------------------------------------------------------------------------- launchers

LOOP = "adamw8bit"
_KINDS = {  # dtypes of parameter and gradient, as the loop numbers them; others are left to the reference
    (torch.float32, torch.float32): 0,
    (torch.float32, torch.bfloat16): 1,
    (torch.bfloat16, torch.float32): 2,
    (torch.bfloat16, torch.bfloat16): 3,
}
NUMEL_OF_THREAD = 65536  # elements for which another thread is worth its start


class _Piece(NamedTuple):
    param: Tensor
    grad: Tensor
    codes: Codes
    step: int

    @property
    def tensors(self) -> list[Tensor | None]:
        """As loop and kernel take them."""
        return [self.param, self.grad, *self.codes]

    def numbers(self, options: AdamWOptions) -> tuple[float, ...]:
        """Return beta1, 1 - beta1, beta2, 1 - beta2, eps, step size and decay, as `_update` computes them."""
        beta1, beta2 = options.beta1, options.beta2
        root = sqrt(1 - beta2**self.step)
        size, decay = options.lr * root / (1 - beta1**self.step), 1 - options.lr * options.weight_decay
        return beta1, 1 - beta1, beta2, 1 - beta2, options.eps * root, size, decay


def _numbers(pieces: Sequence[_Piece], options: AdamWOptions) -> np.ndarray:
    return np.array([piece.numbers(options) for piece in pieces], dtype=np.float32)  # [pieces, 7]


def _loop(library: ctypes.CDLL, pieces: Sequence[_Piece], options: AdamWOptions, block: int) -> None:
    noises = [block_noise(piece.step, block) for piece in pieces]
    rows = [
        [0 if tensor is None else tensor.data_ptr() for tensor in piece.tensors]
        + [noise.ctypes.data, piece.param.numel(), block, _KINDS[piece.param.dtype, piece.grad.dtype]]
        for piece, noise in zip(pieces, noises, strict=True)
    ]
    table, numbers = np.array(rows, dtype=np.int64), _numbers(pieces, options)
    num_threads = min(torch.get_num_threads(), 1 + sum(piece.param.numel() for piece in pieces) // NUMEL_OF_THREAD)
    library.zeroshard_adamw8bit(
        ctypes.c_void_p(table.ctypes.data),
        ctypes.c_void_p(numbers.ctypes.data),
        ctypes.c_int64(len(rows)),
        ctypes.c_int64(num_threads),
    )


def in_one_pass(device_type: str) -> bool:
    """Whether an update there allocates nothing, for it is a loop or kernel; Triton comes with torch for GPUs."""
    return device_type == "cuda" or (device_type == "cpu" and cpu_loops.loop(LOOP) is not None)


# ------------------------------------------------------------------------------------------------------- public


@torch.no_grad()
def adamw8bit(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Codes],
    steps: Sequence[int],
    options: AdamWOptions,
    block: int,
    kernels: Choice | None = None,
) -> None:
    """Update ``params`` and their ``states`` in place, all in one call of a loop or kernel where there is one.

    Args:
        params: pieces, contiguous; fp32, bf16 or fp16, computed in fp32. With ``correction`` one is bf16.
        grads: one for each piece, its shape, of the same dtypes.
        states: codes and scales of each piece.
        steps: t, the number of this update, from 1, of each piece.
        options: hyper-parameters.
        block: elements of a block, counted from each piece's first element; a power of two.
        kernels: backend; see `zeroshard.kernels.use_kernels`. ``"auto"`` is the loop on a CPU that has a compiler;
            ``"reference"``: PyTorch's operations there too.

    Raises:
        ValueError: the backend that was requested by name is not available, or states are not those of their piece.
    """
    together: dict[tuple[object, ...], list[_Piece]] = {}
    may_loop = asked_for(kernels) == "auto" and cpu_loops.loop(LOOP) is not None if params else False
    for param, grad, codes, step in zip(params, grads, states, steps, strict=True):
        piece = _Piece(param, grad.contiguous(), codes, step)
        _check(piece, block)
        backend = _backend(piece, kernels, may_loop=may_loop)
        kind = (param.device, param.dtype, grad.dtype, codes.correction is None) if backend == "triton" else ()
        together.setdefault((backend, *kind), []).append(piece)
    for (backend, *_), pieces in together.items():
        if backend == "reference":
            for piece in pieces:
                adamw8bit_reference(*piece, options, block)
            continue
        if backend == "triton":
            with device_of(pieces[0].param):
                tensors, steps_ = [piece.tensors for piece in pieces], [piece.step for piece in pieces]
                launch(tensors, steps_, _numbers(pieces, options), block)
        elif (library := cpu_loops.loop(LOOP)) is not None:
            _loop(library, pieces, options, block)
        torch.autograd.graph.increment_version([piece.param for piece in pieces])  # as PyTorch's operations do


def _check(piece: _Piece, block: int) -> None:
    """Raise ValueError if a tensor has a size, dtype or place that its address would not tell loop and kernel."""
    (param, grad, (m, m_scales, r, r_scales, correction), _), numel = piece, piece.param.numel()
    each, a_block, device = [m, r], [m_scales, r_scales], param.device
    each += [] if correction is None else [correction]
    num_blocks = -(-numel // block)
    fits = (
        [state.numel() for state in each] == [numel] * len(each)
        and grad.numel() == numel
        and [state.numel() for state in a_block] == [num_blocks] * 2
        and [state.dtype for state in each] == [torch.int8] * len(each)
        and [state.dtype for state in a_block] == [torch.float32] * 2
        and [tensor.device for tensor in (grad, *each, *a_block)] == [device] * (3 + len(each))
        and all(tensor.is_contiguous() for tensor in (param, *each, *a_block))
        and (correction is None or param.dtype == torch.bfloat16)
    )
    if not fits:
        raise ValueError(
            f"states: of {numel} elements in blocks of {block} there must be as many int8 codes, and {num_blocks} fp32 "
            f"scales, on {device}; load states of this optimizer's own block size"
        )


def _backend(piece: _Piece, kernels: Choice | None, *, may_loop: bool) -> Backend | Literal["loop"]:
    """Return the backend of a piece: the reference for tensors without memory and for dtypes that no other takes."""
    dtypes = piece.param.dtype, piece.grad.dtype
    is_plain = {None.__class__, *PLAIN}.issuperset(map(type, piece.tensors))
    if may_loop and is_plain and dtypes in _KINDS and piece.param.is_cpu:
        return "loop"
    backend = choose("adamw8bit", piece.param.device, kernels)
    has_memory = is_plain and piece.param.device.type in ("cpu", "cuda")
    return backend if has_memory and all(dtype in SERVED for dtype in dtypes) else "reference"
