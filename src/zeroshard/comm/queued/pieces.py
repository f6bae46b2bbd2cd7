"""How our collectives see tensors: shard intervals, and flat views or copies of tensors with any strides."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zeroshard.comm.labels import current_label
from zeroshard.comm.operation_log import OperationLog
from zeroshard.comm.queued.worker import Operation

PACKED_BYTES = 1 << 20  # how much of a strided tensor is copied at a time


def shard_interval(numel: int, world_size: int, rank: int) -> tuple[int, int]:
    """Return start and stop of ``rank``'s shard, of ``ceil(numel / world_size)`` elements; the last ones have fewer."""
    size = -(-numel // world_size)
    return min(rank * size, numel), min((rank + 1) * size, numel)


def copy(target: Tensor, source: Tensor) -> None:
    """Do ``target.copy_(source)``, unless they are the same memory.

    It uses memmove where that is possible: for megabytes it takes up to a fifth less CPU time than torch's copy.
    """
    if target.data_ptr() == source.data_ptr():
        return
    alike = target.dtype == source.dtype and target.shape == source.shape
    if alike and lies_in_order(target) and lies_in_order(source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.nbytes)
    else:
        target.copy_(source)


def lies_in_order(tensor: Tensor) -> bool:
    """Return whether the memory of ``tensor`` is its elements in order: contiguous, no lazy conjugation or negation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def on_flat(tensor: Tensor, run: Callable[[Tensor], None]) -> Operation:
    """Return an operation that calls ``run`` on a flat view of ``tensor``, in place.

    If ``tensor`` is not contiguous, it calls ``run`` on a flat copy of one piece after another, and copies them back.
    """
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


def flat_input(tensor: Tensor) -> Tensor:
    """Return ``tensor`` flattened: a view if possible, else a copy."""
    tensor = tensor.detach()
    return tensor if tensor.ndim == 1 else tensor.reshape(-1)


def to_flat(tensor: Tensor, run: Callable[[Tensor], None]) -> Operation:
    """Return an operation that has ``run`` fill ``tensor`` through a flat view; if there is none, through a copy."""
    tensor, flat = tensor.detach(), flat_input(tensor)
    if flat.data_ptr() == tensor.data_ptr():
        return lambda: run(flat)

    def run_on_copy() -> None:
        run(flat)
        tensor.copy_(flat.view(tensor.shape))

    return run_on_copy


def _pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield views that cover ``tensor``, of at most ``limit`` elements each.

    They depend only on the tensor's shape, so they are the same on every rank.
    """
    if tensor.numel() <= limit:
        yield tensor
        return
    num_rows = limit * len(tensor) // tensor.numel()  # rows that fit into a piece
    if num_rows:
        yield from tensor.split(num_rows)
    else:
        for row in tensor:
            yield from _pieces(row, limit)


def topic_of(log: OperationLog, op: str, tensor: Tensor | None) -> int:
    """Log an operation; return its topic: 31 bits of the digest of this and all earlier operations of this rank.

    Ranks send the topic with the data. So when ranks have diverged, a receiver waits or fails, rather than write the
    data of another operation into its tensor.
    """
    size = "" if tensor is None else f"{tensor.nbytes} {tensor.dtype}"
    return int.from_bytes(log.add(f"{op} {size} {current_label()}")[:4], "big") & 0x7FFF_FFFF
