"""Gradients of small parameters, which are copied into their flat buffer together.

A block of GPT-2 has 12 parameters, of which 8 are norms and biases. Where a buffer has three such or more, their first
gradients of a step wait for each other, and are copied in and scaled by two operations for all of them. Large ones
are copied as they come, so no gradient of a size to speak of is kept. Further micro-batches are added as they come:
autograd may hand over a tensor then that others have too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.zero.buffers.layout import FlatLayout

SMALL_NUMEL = 1 << 16  # of a gradient that waits for others
LEAST_TOGETHER = 3  # fewer would take as many operations


class SmallGrads:
    """What waits to be copied into one flat buffer.

    Args:
        layout: of the buffer.
        dtype: of the buffer.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self._waiting: dict[int, Tensor] = {}  # by slot
        small = sum(slot.numel <= SMALL_NUMEL for slot in layout.slots)
        self._num_together = small if small >= LEAST_TOGETHER and dtype.is_floating_point else 0

    def takes(self, grad: Tensor) -> bool:
        """Whether the gradient, the first of its parameter, is small and memory of its own, and there are others."""
        if not self._num_together or grad.numel() > SMALL_NUMEL or grad.layout != torch.strided:
            return False
        return grad.is_floating_point() and grad.untyped_storage().nbytes() <= 2 * max(grad.nbytes, 256)

    def add(self, slot: int, grad: Tensor, views: Sequence[Tensor], scale: float) -> None:
        """Have it wait; with the last of them all are copied in."""
        self._waiting[slot] = grad
        if len(self._waiting) == self._num_together:
            self.copy_in(views, scale)

    def __contains__(self, slot: int) -> bool:
        return slot in self._waiting

    def copy_in(self, views: Sequence[Tensor], scale: float) -> None:
        """Copy what waits into ``views``, the buffer's slots, and multiply it by ``scale``."""
        if not self._waiting:
            return
        targets = [views[slot] for slot in self._waiting]
        torch._foreach_copy_(targets, list(self._waiting.values()))
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
        self._waiting = {}

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of what waits."""
        return sum(grad.nbytes for grad in self._waiting.values())
