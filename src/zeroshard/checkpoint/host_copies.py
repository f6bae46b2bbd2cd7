"""Copies of state in host memory: the memory for them, and asynchronous copies from GPUs while training continues."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm.streams import NO_STREAMS, ByDevice, Mark
from zeroshard.host.errors import UserError

ALIGNMENT_BYTES = 64


class HostMemory:
    """Host memory for copies of tensors, reused by later saves. Unless it is page-locked, unused pages cost nothing."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return a contiguous destination for each of ``tensors``; page-locked memory if any of them is on a GPU.

        Raises:
            UserError: they are on a GPU, and the host has not the memory, or CUDA does not lock it.
        """
        room = (-(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for tensor in tensors)
        *starts, num_bytes = itertools.accumulate(room, initial=0)
        if self._block.numel() < num_bytes:
            self._block = torch.empty(0, dtype=torch.uint8)  # free the old one first
            gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
            self._block = torch.empty(num_bytes, dtype=torch.uint8) if gpu is None else _locked(num_bytes, gpu)
        return [
            self._block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, tensors, strict=True)
        ]


def _locked(num_bytes: int, device: torch.device) -> Tensor:
    from zeroshard.host.slab import Slab  # state on a CPU needs none

    try:
        return Slab(num_bytes, device=device, pinned=True).take(num_bytes, torch.uint8)
    except UserError as error:
        todo = "save while training waits, without a copy: --no-checkpoint-async, or BackgroundSaver(background=False)"
        raise UserError("checkpoint_async", f"a copy of the state: {error.what}", todo) from None


class HostCopies:
    """Copies from GPUs to the host, on each GPU's "save" stream, which first waits for the work queued so far."""

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
