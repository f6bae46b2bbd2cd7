"""Which elements of a flat tensor have changed: by sums of its bits, without a copy, or beside what was shown."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements that are compared at a time: little memory compared with the weights
_CHUNK_ON_CPU = 1 << 17  # elements that fit into a cache
_ROW_WORDS = 251  # 64-bit words in a row of `bit_sums`


def bit_sums(values: Tensor) -> Tensor:
    """Return sums of the bits of ``values [n]``, any dtype, that differ if values do; the host need not wait for them.

    These are sums modulo 2^64 over each row and each column of the 64-bit words, and what does not fill a row. A row
    has `_ROW_WORDS` words, a prime, so that the rows of a matrix start in different columns. A change is detected
    unless it leaves all these sums as they are. No change within one row or one column does. A change of signs does, if
    all are of elements in the upper halves of words, and evenly many in each row and in each column.
    """
    octets = values.detach().view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    words = octets[: len(octets) // 8 * 8].view(torch.int64)
    end = len(words) // _ROW_WORDS * _ROW_WORDS
    chunk = (_CHUNK_ON_CPU if values.device.type == "cpu" else _CHUNK) // 2 // _ROW_WORDS
    rows, columns = [], torch.zeros(_ROW_WORDS, dtype=torch.int64, device=values.device)
    for some in words[:end].view(-1, _ROW_WORDS).split(chunk):
        rows.append(some.sum(1))
        columns.add_(some.sum(0))
    return torch.cat([*rows, columns, words[end:], octets[len(words) * 8 :].to(torch.int64)])


def bit_sums_bytes(num_bytes: int) -> int:
    """The bytes of the `bit_sums` of ``num_bytes``."""
    num_words = num_bytes // 8
    return 8 * (num_words // _ROW_WORDS + _ROW_WORDS + num_words % _ROW_WORDS + num_bytes % 8)


def take_where_it_differs(master: Tensor, written: Tensor, shown: Tensor | None = None) -> bool:
    """Copy to ``master`` the elements of ``written`` that differ from the values that the engine showed for it.

    Args:
        master: ``[n]``, changed in place.
        written: ``[n]``, the weights that the user may have written into, in any dtype.
        shown: ``[n]`` in that dtype, the values that the engine showed; None: ``master`` rounded to that dtype.

    Returns:
        Whether some elements differed; on a GPU whether they may have, because the host does not wait for it.
    """
    if shown is None and master.device.type == "cuda":
        from zeroshard.kernels.written import carried  # late: it imports Triton

        if carried(master, written):
            return True
    length = _CHUNK_ON_CPU if master.device.type == "cpu" else _CHUNK
    differs = False
    pieces = zip(master.split(length), written.split(length), strict=True)
    for index, (mine, theirs) in enumerate(pieces):
        rounded = mine.to(theirs.dtype) if shown is None else shown[index * length : index * length + len(mine)]
        if master.device.type == "cpu" and torch.equal(_bits(rounded), _bits(theirs)):  # would block on a GPU
            continue
        same = (theirs == rounded) | (theirs.isnan() & rounded.isnan() & (shown is not None))
        mine.copy_(torch.where(same, mine, theirs))
        differs = True
    return differs


def _bits(values: Tensor) -> Tensor:
    """View the memory as integers, which compare at least twice as fast."""
    wide = values.numel() * values.element_size() % 8 == 0 and values.storage_offset() * values.element_size() % 8 == 0
    return values.view(torch.int64 if wide else torch.uint8)
