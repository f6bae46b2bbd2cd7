"""Copies of state on the host: the memory that they lie in, and a GPU's copies under way while training goes on.

torch rounds page-locked memory up to a power of two: one block of 10.5 GB would take 16. So it is taken in blocks that
are powers of two themselves, into which tensors are packed, the largest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.zero.streams import NO_STREAMS, ByDevice, Mark

ALIGNMENT_BYTES = 64
BLOCK_BYTES = 1 << 30  # of page-locked memory; a larger tensor has a block of its own size, rounded up


class HostMemory:
    """Memory on the host for copies of tensors, kept from one save to the next; what is never written costs nothing."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Room for each of ``tensors``: contiguous, of its size and dtype, page-locked where any lies on a GPU."""
        pinned = any(tensor.is_cuda for tensor in tensors)
        sizes = [tensor.nbytes for tensor in tensors]
        blocks, places = packed(sizes, BLOCK_BYTES if pinned else None)
        have = [block.numel() for block in self._blocks]
        if len(have) < len(blocks) or any(size > there for there, size in zip(have, blocks, strict=False)):
            self._blocks = []  # free the old ones first
            self._blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in blocks]
        return [
            self._blocks[block][start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for (block, start), tensor in zip(places, tensors, strict=True)
        ]


def packed(sizes: Sequence[int], block_bytes: int | None) -> tuple[list[int], list[tuple[int, int]]]:
    """Blocks in bytes, and of each size ``(block, start)``, where ``start`` is aligned.

    Args:
        sizes: in bytes.
        block_bytes: of a full block, a power of two: blocks are powers of two, and larger only where one size is. Each
            size goes to the first block that has room, the largest size first. None: one block, of any size.
    """
    room = [-(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for size in sizes]
    if block_bytes is None:
        ends = list(itertools.accumulate(room, initial=0))
        return [ends[-1]], [(0, start) for start in ends[:-1]]
    used: list[int] = []
    limits: list[int] = []
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -room[index]):
        size = room[index]
        block = next((b for b, limit in enumerate(limits) if used[b] + size <= limit), len(limits))
        if block == len(limits):
            limits.append(max(block_bytes, power_of_two(size)))
            used.append(0)
        places[index] = (block, used[block])
        used[block] += size
    return [power_of_two(size) for size in used], places


def power_of_two(size: int) -> int:
    """The least one that is not below ``size``."""
    return 1 << (size - 1).bit_length() if size else 0


class HostCopies:
    """Copies from GPUs to the host, each GPU's on a stream of its own, which waits for what it computes now.

    Args:
        streams: of the devices.
    """

    def __init__(self, streams: ByDevice) -> None:
        self._streams = streams
        self._under_way: list[tuple[torch.device, Mark, list[Tensor]]] = []

    def takes(self, device: torch.device) -> bool:
        """Whether the device has streams; what lies elsewhere is copied, or read, by who asks."""
        return self._streams[device] is not NO_STREAMS

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy each first tensor to its second; the first stay as they are until `settle`."""
        for device in dict.fromkeys(tensor.device for tensor, _ in pairs):
            streams, here = self._streams[device], [pair for pair in pairs if pair[0].device == device]
            with streams.on("save", streams.mark()):
                for tensor, place in here:
                    place.copy_(tensor, non_blocking=True)
                self._under_way.append((device, streams.mark(), [tensor for tensor, _ in here]))

    def settle(self) -> None:
        """Have what is queued from now on come after the copies, so that it may change what they read."""
        for device, mark, _ in list(self._under_way):
            self._streams[device].wait(mark)

    def wait(self) -> None:
        """Return when all copies are there; called by the thread that writes them."""
        for _, mark, _ in self._under_way:
            mark.synchronize()
        self._under_way = []
