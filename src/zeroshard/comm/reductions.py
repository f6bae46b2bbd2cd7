"""Sum, max, min and product of two tensors of one dtype, for every dtype that torch can hold.

On a CPU, torch adds neither unsigned integers of 16 to 64 bits nor 8-bit floating-point numbers. The unsigned integers
are added and multiplied as signed integers of the same width, which gives the same bits; for max and min their highest
bit is flipped first. The 8-bit numbers are computed in fp32 and rounded after each operation, as torch does for bf16.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Combine = Callable[..., Tensor]  # (a, b, out=c); c may be a, b or another tensor

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _for_every_dtype(native: Combine, *, compares: bool) -> Combine:
    def combine(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        """Reduce ``a`` and ``b``, of one dtype and shape, elementwise into ``out``, and return it."""
        dtype = a.dtype
        if dtype in _SIGNED:
            signed = _SIGNED[dtype]
            left, right, target = a.view(signed), b.view(signed), out.view(signed)
            if compares:
                highest = torch.iinfo(signed).min
                target.copy_(native(left ^ highest, right ^ highest) ^ highest)
            else:
                native(left, right, out=target)
            return out
        if _is_narrow(dtype):
            return out.copy_(native(a.float(), b.float()))
        return native(a, b, out=out)

    return combine


COMBINE: dict[str, Combine] = {
    "sum": _for_every_dtype(torch.add, compares=False),
    "max": _for_every_dtype(torch.maximum, compares=True),
    "min": _for_every_dtype(torch.minimum, compares=True),
    "product": _for_every_dtype(torch.mul, compares=False),
}


def as_indexable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` if torch can index its dtype, else a view of its bits as an integer dtype of the same width."""
    if tensor.dtype in _SIGNED or _is_narrow(tensor.dtype):
        return tensor.view(_SAME_BITS[tensor.element_size()])
    return tensor
