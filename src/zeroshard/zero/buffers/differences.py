"""What somebody has written into weights that compute in another dtype than their masters have."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements that are compared at a time: little memory beside the weights
_CHUNK_ON_CPU = 1 << 17  # what a cache holds


def take_where_it_differs(master: Tensor, written: Tensor) -> None:
    """Copy from ``written``, of another dtype, the elements that are not what ``master`` rounds to."""
    length = _CHUNK_ON_CPU if master.device.type == "cpu" else _CHUNK
    for mine, theirs in zip(master.split(length), written.split(length), strict=True):
        rounded = mine.to(theirs.dtype)
        if master.device.type == "cpu" and torch.equal(_bits(rounded), _bits(theirs)):  # a GPU is not waited for
            continue
        mine.copy_(torch.where(theirs != rounded, theirs, mine))


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers, which compare twice as fast or more."""
    wide = values.numel() % 8 == 0 and values.storage_offset() % 8 == 0
    return values.view(torch.int64 if wide else torch.uint8)
