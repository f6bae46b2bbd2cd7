"""Optimizer states of any shape as 8-bit codes and a scale for each block, and back: `adamw8bit`'s codes of a tensor.

    exp_avg, momentum_buffer      signed codes of the values        ``<kind>_codes``, ``<kind>_scales``
    exp_avg_sq, square_avg, ...   unsigned codes of their roots     the same
    exp_inf                       unsigned codes of the values      the same

Blocks are counted from the tensor's first element, and the last one may be shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from zeroshard.kernels.adamw8bit import decode_signed, decode_unsigned, encode_signed, encode_unsigned

CODES, SCALES = "_codes", "_scales"  # a state that is called exp_avg in fp32 is exp_avg_codes and exp_avg_scales
CORRECTION = "correction"  # the state that has 8 further bits of a weight in bf16


class Code(Enum):
    """Which 8-bit codes a state has; those without a sign never become zero."""

    SIGNED = "a mean of gradients or updates"
    ROOT = "a mean, sum or bound of squares, whose root has no sign"
    MAGNITUDE = "a bound of absolute values"


CODE_OF = {
    **dict.fromkeys(("exp_avg", "momentum_buffer"), Code.SIGNED),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta"), Code.ROOT),
    "exp_inf": Code.MAGNITUDE,
}
"""The states that have codes, by the names that torch's classes give them."""


def num_blocks(numel: int, block: int) -> int:
    """Blocks of a tensor, the last of which may be shorter."""
    return -(-numel // block)


def block_of(numel: int, num_scales: int) -> int:
    """Return the elements of a block of a tensor that has so many scales; if there is one scale, at least ``numel``.

    Blocks are powers of two, and no two of them cut a tensor into the same number of blocks above one.
    """
    block = 1
    while num_blocks(numel, block) > max(num_scales, 1):
        block *= 2
    return block


def encoded(values: Tensor, block: int, code: Code) -> tuple[Tensor, Tensor]:
    """Return ``values``, of any shape and floating dtype, as int8 codes of that shape and fp32 scales ``[blocks]``.

    A code of `Code.ROOT` decodes to its square.
    """
    numel = values.numel()
    rows = torch.zeros(num_blocks(numel, block) * block, dtype=torch.float32, device=values.device)
    rows[:numel] = values.reshape(-1)
    rows = (rows.sqrt_() if code is Code.ROOT else rows).view(-1, block)
    codes = torch.empty(rows.shape, dtype=torch.int8, device=values.device)
    scales = rows.new_empty(len(rows))
    if numel:
        (encode_signed if code is Code.SIGNED else encode_unsigned)(rows, codes, scales, torch.empty_like(rows))
    return codes.view(-1)[:numel].view(values.shape).clone(), scales


def decoded(codes: Tensor, scales: Tensor, block: int, code: Code) -> Tensor:
    """Return what `encoded` encoded, within the precision of the codes: fp32, in the shape of ``codes``."""
    numel = codes.numel()
    padded = torch.zeros(num_blocks(numel, block) * block, dtype=torch.int8, device=codes.device)
    padded[:numel] = codes.reshape(-1)
    rows = torch.empty(len(scales), block, dtype=torch.float32, device=codes.device)
    if numel:
        (decode_signed if code is Code.SIGNED else decode_unsigned)(
            padded.view(-1, block), scales, rows, torch.empty_like(rows)
        )
    values = rows.view(-1)[:numel].view(codes.shape)
    return values.mul_(values) if code is Code.ROOT else values


def as_codes(state: Mapping[str, Any], block: int) -> dict[str, Any]:
    """Return a parameter's states with those that have codes encoded in blocks; others, and codes, are kept."""
    found: dict[str, Any] = {}
    for kind, value in state.items():
        if kind in CODE_OF:
            codes, scales = encoded(value, block, CODE_OF[kind])
            found |= {kind + CODES: codes, kind + SCALES: scales}
        else:
            found[kind] = value
    return found


def as_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a parameter's states with codes and scales decoded to fp32 states; others are kept."""
    found = dict(state)
    for kind, code in CODE_OF.items():
        if kind + CODES in state:
            codes, scales = found.pop(kind + CODES), found.pop(kind + SCALES)
            found[kind] = decoded(codes, scales, block_of(codes.numel(), scales.numel()), code)
    return found
