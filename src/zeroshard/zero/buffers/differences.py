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

import torch
from torch import Tensor, nn

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


def fingerprint(values: Tensor) -> int:
    """Of the bits of ``values [n]`` fp32 or 16 bits wide, on the CPU: another one if an element is another.

    A sum of each element's bits times an odd number of its place, modulo 2^32: one element's change is always seen, and
    those of several go unseen with a probability of about 2^-32.
    """
    bits = values.view(torch.int32 if values.element_size() == 4 else torch.int16)
    length = min(_CHUNK_ON_CPU, values.numel())
    odd = torch.arange(length, dtype=torch.int32).mul_(-1640531535).bitwise_or_(1)
    scratch, found = torch.empty(length, dtype=torch.int32), 0
    for chunk in bits.split(_CHUNK_ON_CPU):
        part = scratch[: len(chunk)]
        found = (found * 31 + _total(torch.mul(chunk, odd[: len(chunk)], out=part))) & (2**64 - 1)
    return found


def _total(words: Tensor) -> int:
    """The sum of ``words [n]`` int32 by pairs, as 64-bit numbers: eight times as fast as one by one."""
    even = len(words) // 2 * 2
    return int(words[:even].view(torch.int64).sum()) + int(words[even:].sum())


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
