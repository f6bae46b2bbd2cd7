"""Copies of state in host memory: the memory for them, and asynchronous copies from GPUs while training continues.

torch rounds page-locked memory up to a power of two: one block of 10.5 GB would take 16 GB. So we allocate blocks whose
sizes are powers of two, and pack tensors into them, the largest first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.streams import NO_STREAMS, ByDevice, Mark

ALIGNMENT_BYTES = 64
BLOCK_BYTES = 1 << 30  # of page-locked memory; a larger tensor gets a block of its own, rounded up


class HostMemory:
    """Host memory for copies of tensors, reused by later saves. Unless it is page-locked, unused pages cost nothing."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a contiguous destination for each of ``tensors``; page-locked memory if any of them is on a GPU."""
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
    """Return the blocks' sizes in bytes, and for each of ``sizes`` its ``(block, start)``, where ``start`` is aligned.

    Args:
        sizes: sizes of the tensors, in bytes.
        block_bytes: size of a full block, a power of two. Blocks are powers of two, and larger than this only if one
            tensor is. Each size goes to the first block that has room, the largest size first. None: one block, of any
            size.
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
    """Return the smallest power of two that is not below ``size``; 0 for 0."""
    return 1 << (size - 1).bit_length() if size else 0


class HostCopies:
    """Copies from GPUs to the host, on each GPU's "save" stream, which first waits for the work queued so far.

    Args:
        streams: the streams of each device.
    """

    def __init__(self, streams: ByDevice) -> None:
        self._streams = streams
        self._under_way: list[tuple[torch.device, Mark, list[Tensor]]] = []

    def accepts(self, device: torch.device) -> bool:
        """Whether copies from this device run on a stream; the caller copies or reads tensors on other devices."""
        return self._streams[device] is not NO_STREAMS

    def begin(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Begin to copy the first tensor of each pair to the second; the first must not change before `settle`."""
        for device in dict.fromkeys(tensor.device for tensor, _ in pairs):
            streams, here = self._streams[device], [pair for pair in pairs if pair[0].device == device]
            with streams.on("save", streams.mark()):
                for tensor, place in here:
                    place.copy_(tensor, non_blocking=True)
                self._under_way.append((device, streams.mark(), [tensor for tensor, _ in here]))

    def settle(self) -> None:
        """Make the current stream wait for the copies, so that work queued later may change the tensors they read."""
        for device, mark, _ in list(self._under_way):
            self._streams[device].wait(mark)

    def wait(self) -> None:
        """Block until all copies have finished; called by the writer thread."""
        for _, mark, _ in self._under_way:
            mark.synchronize()
        self._under_way = []
