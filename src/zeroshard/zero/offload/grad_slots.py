"""`GradSlots`: host memory through which reduced gradients go to the rank's file, while backward goes on.

A unit's gradients are copied to a slot as they arrive, and written from there by the file's threads. There are two
slots, so one is filled while the other is written; a slot is filled again once its write is over.
"""

from __future__ import annotations

from collections.abc import Hashable
from concurrent.futures import wait

import torch
from torch import Tensor

from zeroshard.host.slab import Slab
from zeroshard.zero.offload.disk import DiskStates
from zeroshard.zero.offload.staging import Landing, Staging

NUM_GRAD_SLOTS = 2


class GradSlots:
    """The slots of one rank.

    Args:
        file: the rank's.
        staging: says what may be page-locked, and on which streams copies from a GPU run.
    """

    def __init__(self, file: DiskStates, staging: Staging) -> None:
        self._file, self._staging = file, staging
        self._slots: list[tuple[Tensor, Landing]] = []  # the one used longest ago first

    @property
    def memory(self) -> list[Tensor]:
        """The slots' memory."""
        return [slot for slot, _ in self._slots]

    def send(self, unit: Hashable, values: Tensor) -> Landing:
        """Begin to write ``values [numel]``, a unit's gradients on any device, to the file.

        Raises:
            OSError: the write before the last failed.
        """
        slot = self._free_slot(values.device)
        target, streams = slot[: values.nbytes].view(values.dtype), self._staging.streams
        with streams.on("to_host", streams.mark()):
            target.copy_(values, non_blocking=True)
            copied = streams.mark()
        if copied is not None:
            self._staging.leaves(values, copied)
        landing = Landing(self._file.write_input(unit, slot, None if copied is None else copied.synchronize))
        self._slots = [*self._slots, (slot, landing)]  # another list, as accounts of another thread may read this one
        return landing

    def _free_slot(self, device: torch.device) -> Tensor:
        """Take a slot for the largest unit out of the list: a new one, or the one used longest ago."""
        units = self._file.input_bytes
        if len(self._slots) < min(NUM_GRAD_SLOTS, len(units)):
            return self._new(max(units), device)
        (slot, landing), self._slots = self._slots[0], self._slots[1:]
        wait(landing.pieces)  # before an error, so that nothing reads the slot when it is given up
        landing.synchronize()
        return slot if len(slot) >= max(units) else self._new(max(units), device)

    def _new(self, num_bytes: int, device: torch.device) -> Tensor:
        pinned = device.type == "cuda" and self._staging.pins(num_bytes)
        return Slab(num_bytes, device=device, pinned=pinned).take(num_bytes, torch.uint8)
