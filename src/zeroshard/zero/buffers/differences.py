"""What somebody has written into weights that compute in another dtype than their masters have, or travel otherwise.

[Note: Changes in place]
    A user may write into weights: clip them, prune them, draw them anew. Where they are (a view of) the master, that is
    all. Else they are compared with the master before it is used, and what differs is taken over: always where the
    master is the wider one, because a write through ``.data`` leaves no trace. Where it is not, and before sharded
    weights are freed, they are compared if autograd's version counters say that somebody wrote: what a module writes
    through ``.data`` in its own forward is not seen at stage 3, use ``torch.no_grad()``. Who assigns ``param.data`` (as
    `torch.nn.utils.vector_to_parameters` does) has the parameter show another tensor: its values are taken over, and
    the parameter shows the buffer again.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_CHUNK = 1 << 22  # elements that are compared at a time: little memory beside the weights
_CHUNK_ON_CPU = 1 << 17  # what a cache holds
_ROW_WORDS = 251  # of a fingerprint


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


def fingerprint(values: Tensor) -> int:
    """64 bits of the bits of ``values [n]``, any dtype, on the CPU: others where values are others, alike on any rank.

    A hash of sums modulo 2^64: of each row and each column of the 64-bit words, `_ROW_WORDS` in a row, a prime, so that
    rows of a matrix lie across other columns each. A change is seen, but for a probability of 2^-64, unless it leaves
    all these sums as they are, as no change within one row or one column does. Signs that change, of elements in upper
    halves of words alone and evenly many in each row and each column, do.
    """
    octets = values.view(torch.uint8)
    if octets.storage_offset() % 8:
        octets = octets.clone()
    num_rows = len(octets) // (8 * _ROW_WORDS)
    end = num_rows * 8 * _ROW_WORDS
    found = hashlib.blake2b(octets[end:].numpy(), digest_size=8)
    columns = torch.zeros(_ROW_WORDS, dtype=torch.int64)
    for some in octets[:end].view(torch.int64).view(num_rows, _ROW_WORDS).split(_CHUNK_ON_CPU // 2 // _ROW_WORDS):
        found.update(some.sum(1).numpy())
        columns.add_(some.sum(0))
    found.update(columns.numpy())
    return int.from_bytes(found.digest(), "little")


def take_assigned(elsewhere: list[tuple[str, nn.Parameter, Tensor]]) -> bool:
    """Have what was assigned to a parameter's ``.data`` be its values, in its place; whether there was any.

    ``elsewhere``: ``(name, parameter, its place)`` of those that show another tensor.
    """
    for name, param, view in elsewhere:
        if param.shape != view.shape:
            raise RuntimeError(
                f"{name}: its .data is a tensor of shape {tuple(param.shape)} now; a parameter under an engine "
                f"keeps its shape, {tuple(view.shape)}"
            )
        with torch.no_grad():
            view.copy_(param.data)
        param.data = view
    return bool(elsewhere)


def refuse_assigned(elsewhere: list[tuple[str, nn.Parameter, Tensor]]) -> None:
    """Raise where a tensor was assigned to the ``.data`` of weights that are hidden; ``elsewhere``: as above."""
    for name, param, freed in elsewhere:
        param.data = freed
        raise RuntimeError(
            f"{name}: its .data was assigned to while the weights were sharded; "
            "do it inside zero.full_params(write_back=True)"
        )


def _bits(values: Tensor) -> Tensor:
    """The same memory as integers, which compare twice as fast or more."""
    wide = values.numel() * values.element_size() % 8 == 0 and values.storage_offset() * values.element_size() % 8 == 0
    return values.view(torch.int64 if wide else torch.uint8)
