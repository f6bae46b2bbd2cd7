"""What a reduction does with two tensors of one dtype, for every dtype that torch can hold.

torch adds neither unsigned integers of 16 to 64 bits nor numbers of 8 bits on a CPU. The former are added and
multiplied as signed integers of their width, which have the same bits, and compared with their highest bit flipped;
the latter are computed in fp32 and rounded after each operation, as narrow dtypes are that torch does add.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Combine = Callable[..., Tensor]  # (a, b, out=c), c being a or b or neither

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
_SAME_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


def _for_every_dtype(native: Combine, *, compares: bool) -> Combine:
    def combine(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
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
    """``tensor``, or its bits in a dtype of the same width that torch can index."""
    if tensor.dtype in _SIGNED or _is_narrow(tensor.dtype):
        return tensor.view(_SAME_BITS[tensor.element_size()])
    return tensor
