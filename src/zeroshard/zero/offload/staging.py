"""`Staging`: page-locked memory through which values go up to a GPU, cast on the host, while the host goes on."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from zeroshard.comm.streams import NO_STREAMS, Mark, Streams
from zeroshard.slab import Slab

SLOT_BYTES = 32 << 20
NUM_SLOTS = 4
NUM_LEAVING = 1  # tensors that are copied down while the next one is computed


class Staging:
    """A ring of slots; a slot is written again once the copy out of it is over.

    Args:
        limit: the most page-locked bytes, for all that asks `pins`; None: no limit.

    Attributes:
        streams: of the device that is copied to.
    """

    def __init__(self, limit: int | None) -> None:
        self._left = limit
        self.streams: Streams = NO_STREAMS
        self._slots: list[tuple[Tensor, Mark]] = []
        self._copying = threading.Lock()  # an update copies up, and so does a gather of weights that were loaded
        self._leaving: list[tuple[Tensor, Mark]] = []
        self._number: tuple[Tensor, Tensor, Mark] | None = None  # of the device, its copy, behind that copy

    def pins(self, num_bytes: int) -> bool:
        """Whether ``num_bytes`` more may be page-locked; they then count."""
        if self._left is None:
            return True
        fits = num_bytes <= self._left
        self._left -= num_bytes if fits else 0
        return fits

    def leaves(self, tensor: Tensor, copied: Mark) -> None:
        """Keep a tensor of the device until its copy is over; the current stream waits for the copy of an older one."""
        self._leaving.append((tensor, copied))
        while len(self._leaving) > NUM_LEAVING:
            self.streams.wait(self._leaving.pop(0)[1])  # [Note: No record_stream] in `streams`

    def number(self, there: Tensor) -> tuple[Tensor, Mark]:
        """Return a 0-dim tensor's copy on the host, and a mark behind it: before, the copy is not to be read."""
        if there.device.type == "cpu":
            return there, None
        if self._number is None or self._number[0] is not there:  # a clip factor comes once for each group
            with self.streams.on("to_host", self.streams.mark()):
                here = there.to("cpu", non_blocking=True)
                self._number = there, here, self.streams.mark()
        return self._number[1], self._number[2]

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy ``source [n]`` on the host to ``target [n]``, in its dtype, on the current stream."""
        if target.device == source.device or self.streams is NO_STREAMS:
            target.copy_(source)
            return
        with self._copying:
            self._copy(target, source)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        length = SLOT_BYTES // target.itemsize
        for there, here in zip(target.split(length), source.split(length), strict=True):
            slot, last = self._slots.pop(0) if len(self._slots) == NUM_SLOTS else (self._new(target.device), None)
            if last is not None:
                last.synchronize()  # the host would write what the device has not read
            staged = slot[: here.numel() * target.itemsize].view(target.dtype)
            staged.copy_(here)
            there.copy_(staged, non_blocking=True)
            self._slots.append((slot, self.streams.mark()))

    def _new(self, device: torch.device) -> Tensor:
        return Slab(SLOT_BYTES, device=device, pinned=self.pins(SLOT_BYTES)).take(SLOT_BYTES, torch.uint8)
