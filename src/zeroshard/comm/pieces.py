"""How collectives of ours cut tensors: shards, chunks, and pieces of tensors whose elements do not lie in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm.base import Work

Steps = Iterator[Work]  # an operation, as an iterator over what it waits for
PACKED_BYTES = 1 << 20  # of a strided tensor, copied at a time

COMBINE: dict[str, Callable[..., Any]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def shard_interval(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Start and stop of rank ``rank``'s shard: ``ceil(numel / world_size)`` elements, fewer or none at the end."""
    size = -(-numel // world_size)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def copy(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)``, unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def on_flat(tensor: Tensor, steps: Callable[[Tensor], Steps]) -> Steps:
    """Run ``steps`` on ``tensor`` as a flat view; on copies of its pieces, one by one, where there is no such view."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return steps(tensor.view(-1))
    return _on_packed(tensor, steps)


def _on_packed(tensor: Tensor, steps: Callable[[Tensor], Steps]) -> Steps:
    for piece in _pieces(tensor, max(PACKED_BYTES // tensor.element_size(), 1)):
        packed = piece.clone(memory_format=torch.contiguous_format)
        yield from steps(packed.view(-1))
        piece.copy_(packed)


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Views that cover ``tensor``, of at most ``limit`` elements; cut by shape alone, so alike on every rank."""
    if tensor.numel() <= limit:
        yield tensor
        return
    num_rows = limit * len(tensor) // tensor.numel()  # that fit
    if num_rows:
        yield from tensor.split(num_rows)
    else:
        for row in tensor:
            yield from _pieces(row, limit)
