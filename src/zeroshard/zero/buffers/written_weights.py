"""Carry values that a user writes into weights over to the master weights, if these are another tensor.

[Note: Changes in place]
    A user may write into weights: clip them, prune them, draw them anew. If the weights are (a view of) the master,
    nothing is left to do. Otherwise the engine compares them with the master before it uses the master, and copies the
    elements that differ. It always compares if the weights are rounded (the master is wider, or they have a wire
    format), because a write through ``.data`` leaves no trace. If they are not, and before sharded weights are freed,
    it compares only if autograd's version counters show a write. So what a module writes through ``.data`` in its own
    forward at stage 3 is lost: write under ``torch.no_grad()`` instead. After an assignment to ``param.data`` (as in
    `torch.nn.utils.vector_to_parameters`) the parameter shows another tensor: the engine copies its values to the
    parameter's place in the buffer, and makes the parameter a view of the buffer again.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from zeroshard.lazily import loaded
from zeroshard.zero.core.weights import WeightTransport

_CHUNK = 1 << 22  # elements that are compared at a time: little memory compared with the weights
_CHUNK_ON_CPU = 1 << 17  # elements that fit into a cache
_ROW_WORDS = 251  # 64-bit words in a row of `bit_sums`


@runtime_checkable
class TakesWritten(Protocol):
    """A `WeightTransport` after which unsharded weights have other values than the master, rounded to their dtype."""

    def take_written(self, master: Tensor, written: Tensor) -> None:
        """As `take_written`."""
        ...


def take_written(transport: WeightTransport, master: Tensor, written: Tensor) -> None:
    """Copy to ``master [n]`` what a user has written into its part of the weights, ``written [n]``."""
    if isinstance(transport, TakesWritten):
        transport.take_written(master, written)
    elif written.dtype == master.dtype:
        master.copy_(written)
    else:
        take_where_it_differs(master, written)


def take_where_it_differs(master: Tensor, written: Tensor, shown: Tensor | None = None) -> bool:
    """Copy to ``master`` the elements of ``written`` that differ from the values that the engine showed for it.

    Args:
        master: ``[n]``, changed in place.
        written: ``[n]``, the weights that the user may have written into, in any dtype.
        shown: ``[n]`` in that dtype, the values that the engine showed; None: ``master`` rounded to that dtype.

    Returns:
        Whether some elements differed; on a GPU whether they may have, because the host does not wait for it.
    """
    if (
        shown is None
        and master.device.type == "cuda"
        and loaded("zeroshard.kernels.written", "carried")(master, written)
    ):
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


def _bits(values: Tensor) -> Tensor:
    """View the memory as integers, which compare at least twice as fast."""
    wide = values.numel() * values.element_size() % 8 == 0 and values.storage_offset() * values.element_size() % 8 == 0
    return values.view(torch.int64 if wide else torch.uint8)
