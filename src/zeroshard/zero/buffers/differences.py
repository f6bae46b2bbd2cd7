"""What somebody has written into weights that compute in another dtype than their masters have."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements that are compared at a time: little memory beside the weights
_CHUNK_ON_CPU = 1 << 17  # what a cache holds


def take_where_it_differs(master: Tensor, written: Tensor, shown: Tensor | None = None) -> bool:
    """Copy from ``written`` the elements that are not what ``master`` was shown as.

    Args:
        master: ``[n]``, changed in place.
        written: ``[n]``, in any dtype.
        shown: ``[n]`` in that dtype, where it is not what ``master`` rounds to.

    Returns:
        Whether there may have been any; on the CPU whether there were.
    """
    length = _CHUNK_ON_CPU if master.device.type == "cpu" else _CHUNK
    differs = False
    pieces = zip(master.split(length), written.split(length), strict=True)
    for index, (mine, theirs) in enumerate(pieces):
        rounded = mine.to(theirs.dtype) if shown is None else shown[index * length : index * length + len(mine)]
        if master.device.type == "cpu" and torch.equal(_bits(rounded), _bits(theirs)):  # a GPU is not waited for
            continue
        same = (theirs == rounded) | (theirs.isnan() & rounded.isnan() & (shown is not None))
        mine.copy_(torch.where(same, mine, theirs))
        differs = True
    return differs


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers, which compare twice as fast or more."""
    wide = values.numel() * values.element_size() % 8 == 0 and values.storage_offset() * values.element_size() % 8 == 0
    return values.view(torch.int64 if wide else torch.uint8)
