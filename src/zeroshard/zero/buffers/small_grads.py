"""`SmallGrads`: gradients that are copied into the flat buffer together, in fewer operations and with the same bits.

[Note: Small gradients]
    Gradients of small parameters wait for each other, and two operations copy all of them into the flat buffer. A block
    of GPT-2 has 12 parameters, of which 8 are norms and biases. If a buffer has at least three such parameters, their
    first gradients of a step wait until all have arrived; then one foreach operation copies them and one scales them.
    Large gradients are copied as they arrive, so only little memory waits. Gradients of later micro-batches are added
    as they arrive, because autograd may then hand over a tensor that it shares with others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.torch_internals import copy_each, scale_each
from zeroshard.zero.core.layout import FlatLayout

SMALL_NUMEL = 1 << 16  # most elements of a gradient that waits for others
LEAST_TOGETHER = 3  # fewer gradients would need as many operations together as one by one


class SmallGrads:
    """The gradients that wait to be copied into one flat buffer: [Note: Small gradients].

    Args:
        layout: layout of the buffer.
        dtype: dtype of the buffer.

    Attributes:
        waiting: the gradients, by slot.
        num_bytes: their bytes.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.num_bytes = 0
        small = sum(slot.numel <= SMALL_NUMEL for slot in layout.slots)
        self._num_together = small if small >= LEAST_TOGETHER and dtype.is_floating_point else 0

    def should_wait(self, grad: Tensor) -> bool:
        """Whether ``grad``, its parameter's first, is to wait: it is small, owns its memory, and others will follow."""
        if not self._num_together or grad.numel() > SMALL_NUMEL or grad.layout != torch.strided or grad.requires_grad:
            return False
        return grad.is_floating_point() and grad.untyped_storage().nbytes() <= 2 * max(grad.nbytes, 256)

    def defer(self, slot: int, grad: Tensor, views: Sequence[Tensor], scale: float) -> None:
        """Let the gradient wait; if it is the last one expected, copy all into the buffer."""
        self.waiting[slot] = grad
        self.num_bytes += grad.nbytes
        if len(self.waiting) == self._num_together:
            self.copy_in(views, scale)

    def copy_in(self, views: Sequence[Tensor], scale: float) -> None:
        """Copy the waiting gradients into ``views``, the buffer's slots, and multiply them by ``scale``."""
        if not self.waiting:
            return
        targets = [views[slot] for slot in self.waiting]
        copy_each(targets, list(self.waiting.values()))
        if scale != 1.0:
            scale_each(targets, scale)
        self.clear()

    def clear(self) -> None:
        """Drop the waiting gradients."""
        self.waiting, self.num_bytes = {}, 0
