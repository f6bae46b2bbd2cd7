"""How collectives of ours cut tensors: shards, chunks, and pieces of tensors whose elements do not lie in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zeroshard.comm.worker import Operation

PACKED_BYTES = 1 << 20  # of a strided tensor, copied at a time

Combine = Callable[..., Tensor]  # (a, b, out=c), c being a or b or neither

COMBINE: dict[str, Combine] = {
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


def on_flat(tensor: Tensor, run: Callable[[Tensor], None]) -> Operation:
    """``run`` on a flat view of ``tensor``; where there is none, on copies of its pieces, one by one."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        return lambda: run(flat)

    def run_on_copies() -> None:
        for piece in _pieces(tensor, max(PACKED_BYTES // tensor.element_size(), 1)):
            packed = piece.clone(memory_format=torch.contiguous_format)
            run(packed.view(-1))
            piece.copy_(packed)

    return run_on_copies


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
