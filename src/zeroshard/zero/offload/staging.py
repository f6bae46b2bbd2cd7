"""`Staging`: page-locked memory through which values go up to a GPU, cast on the host, while the host goes on.

Gradients come down to page-locked memory of their own, or, where ``pinned`` bounds that, to ordinary memory:

    the device    gradients   --copied down-->   slot of a ring   --moved by a thread-->   gradients
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from zeroshard.comm.streams import NO_STREAMS, Mark, Streams
from zeroshard.host.slab import ALIGNMENT_BYTES, Slab

SLOT_BYTES = 32 << 20
LEAST_SLOT_BYTES = 1 << 20
NUM_SLOTS = 4
NUM_SLOTS_DOWN = 2
NUM_LEAVING = 1  # tensors that are copied down while the next one is computed


class Landing:
    """Work of other threads that is under way, and after which values are there; a mark, as of a copy to the host."""

    def __init__(self, pieces: list[Future[None]]) -> None:
        self.pieces = pieces

    def synchronize(self) -> None:
        """Wait until it is over.

        Raises:
            OSError: it failed.
        """
        for piece in self.pieces:
            piece.result()


def locked_slot_bytes(limit: int | None) -> int:
    """The size of a slot under a bound of page-locked bytes; 0: slots are ordinary memory.

    The rings' part of the bound is set aside first: what else is not locked goes through them.
    """
    if limit is None:
        return SLOT_BYTES
    num_bytes = min(limit // (NUM_SLOTS + NUM_SLOTS_DOWN) // ALIGNMENT_BYTES * ALIGNMENT_BYTES, SLOT_BYTES)
    return num_bytes if num_bytes >= LEAST_SLOT_BYTES else 0


class Staging:
    """Two rings of slots, up and down; a slot is written again once the copy out of it is over.

    Args:
        limit: the most page-locked bytes, of the slots and of all that asks `pins`; None: no limit.

    Attributes:
        streams: of the device that is copied to.
        slot_bytes: the size of a slot.
    """

    def __init__(self, limit: int | None) -> None:
        locked = locked_slot_bytes(limit)
        self._locks_slots, self.slot_bytes = locked > 0, locked or SLOT_BYTES
        self._left = limit if limit is None else limit - (NUM_SLOTS + NUM_SLOTS_DOWN) * locked
        self._down: list[tuple[Tensor, Future[None]]] = []  # the slot used longest ago first
        self._mover: ThreadPoolExecutor | None = None
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
        length = self.slot_bytes // target.itemsize
        for there, here in zip(target.split(length), source.split(length), strict=True):
            slot, last = self._slots.pop(0) if len(self._slots) == NUM_SLOTS else (self._new(target.device), None)
            if last is not None:
                last.synchronize()  # the host would write what the device has not read
            staged = slot[: here.numel() * target.itemsize].view(target.dtype)
            staged.copy_(here)
            there.copy_(staged, non_blocking=True)
            self._slots.append((slot, self.streams.mark()))

    def _new(self, device: torch.device) -> Tensor:
        return Slab(self.slot_bytes, device=device, pinned=self._locks_slots).take(self.slot_bytes, torch.uint8)

    def copy_down(self, target: Tensor, source: Tensor) -> Mark:
        """Begin to copy ``source [n]`` on a GPU to ``target [n]``, ordinary memory; return what waits for the copy.

        The host waits for a slot, as fast as the bus is, where it has more than the ring under way.
        """
        streams, pieces, copied = self.streams, [], None
        if not self._locks_slots:  # a slot would be ordinary memory too
            with streams.on("to_host", streams.mark()):
                target.copy_(source, non_blocking=True)
                copied = streams.mark()
            self.leaves(source, copied)
            return copied
        if self._mover is None:
            self._mover = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-gradients")
        length = self.slot_bytes // source.itemsize
        # No version is counted where another thread writes: norms are known from before.
        for there, here in zip(source.split(length), target.data.split(length), strict=True):
            slot = self._slot_down(source.device)
            staged = slot[: there.nbytes].view(source.dtype)
            with streams.on("to_host", streams.mark()):
                staged.copy_(there, non_blocking=True)
                copied = streams.mark()
            moved = self._mover.submit(_moved, here, staged, copied)
            self._down.append((slot, moved))
            pieces.append(moved)
        self.leaves(source, copied)
        return Landing(pieces)

    def _slot_down(self, device: torch.device) -> Tensor:
        if len(self._down) < NUM_SLOTS_DOWN:
            return self._new(device)
        slot, moved = self._down.pop(0)
        moved.result()  # the device would write what has not been moved
        return slot


def _moved(target: Tensor, staged: Tensor, copied: Mark) -> None:
    copied.synchronize()
    target.copy_(staged)
