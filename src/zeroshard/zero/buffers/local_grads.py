"""`FusedGrads`: `Gradients` that add up this rank's own gradients in fewer operations, with the same bits.

[Note: Small gradients]
    Gradients of small parameters wait for each other, and two operations copy all of them into the flat buffer. A block
    of GPT-2 has 12 parameters, of which 8 are norms and biases. If a buffer has at least three such parameters, their
    first gradients of a step wait until all have arrived; then one foreach operation copies them and one scales them.
    Large gradients are copied as they arrive, so only little memory waits. Gradients of later micro-batches are added
    as they arrive, because autograd may then hand over a tensor that it shares with others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from zeroshard.torch_internals import copy_each, scale_each
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.layout import FlatLayout

SMALL_NUMEL = 1 << 16  # most elements of a gradient that waits for others
LEAST_TOGETHER = 3  # fewer gradients would need as many operations together as one by one


class SmallGrads:
    """The gradients that wait to be copied into one flat buffer: [Note: Small gradients].

    Args:
        layout: layout of the buffer.
        dtype: dtype of the buffer.

    Attributes:
        num_bytes: bytes of the waiting gradients.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self._waiting: dict[int, Tensor] = {}  # by slot
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
        self._waiting[slot] = grad
        self.num_bytes += grad.nbytes
        if len(self._waiting) == self._num_together:
            self.copy_in(views, scale)

    def copy_in(self, views: Sequence[Tensor], scale: float) -> None:
        """Copy the waiting gradients into ``views``, the buffer's slots, and multiply them by ``scale``."""
        if not self._waiting:
            return
        targets = [views[slot] for slot in self._waiting]
        copy_each(targets, list(self._waiting.values()))
        if scale != 1.0:
            scale_each(targets, scale)
        self.clear()

    def clear(self) -> None:
        """Drop the waiting gradients."""
        self._waiting, self.num_bytes = {}, 0


class FusedGrads(Gradients):
    """`Gradients` whose small ones are copied into the local buffer together, and others in one kernel each."""

    @cached_property
    def _small(self) -> SmallGrads:
        return SmallGrads(self.layout, self.reduce_dtype)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of small gradients that wait to be copied into the local buffer."""
        return self._small.num_bytes

    def accumulate(self, slot: int, grad: Tensor) -> None:
        """Add ``grad`` (the parameter's shape, the compute dtype) to slot ``slot`` of this rank's sum."""
        if self.used[slot]:
            self._copy_in()  # the slot's first gradient may be among those that wait
        elif self._small.should_wait(grad):
            self._vacate_local()
            self._small.defer(slot, grad, self._local_views(), self._scale)
            self.written[slot] = self.used[slot] = True
            return
        super().accumulate(slot, grad)

    def _copy_in(self) -> None:
        """Copy the small gradients that wait into the local buffer, and scale them."""
        self._small.copy_in(self._views, self._scale)

    def _complete(self) -> Tensor:
        self._copy_in()
        return super()._complete()

    def clear(self, slots: set[int]) -> None:
        """Drop the gradients of ``slots``; when no slot has one, free all buffers."""
        super().clear(slots)
        if any(self.used):
            self._copy_in()  # those of other slots; what lies in a slot without a gradient is not read
        else:
            self._small.clear()

    @cached_property
    def _scale_is_exact(self) -> bool:
        """Whether it is a power of two, so that no product is rounded."""
        return math.frexp(self._scale)[0] == 0.5

    @cached_property
    def _scale_on_device(self) -> Tensor | None:
        """The scale as a tensor ``[1]`` in the dtype that travels, by which one kernel widens and scales a gradient.

        Multiplied by a Python number, the product would be rounded to the gradient's dtype. Only on a GPU, whose
        kernels widen as they read; a CPU would first make a wide copy of the gradient, so there the gradient is copied
        into place and multiplied there. Both give the same bits.
        """
        if self.device.type != "cuda" or self._scale == 1.0 or not self.reduce_dtype.is_floating_point:
            return None
        return torch.tensor([self._scale], dtype=self.reduce_dtype, device=self.device)

    def _add(self, view: Tensor, grad: Tensor, *, first: bool) -> None:
        scale, scale_on_device = self._scale, self._scale_on_device
        if not first:
            if self._scale_is_exact:
                view.add_(grad, alpha=scale)
            else:
                view.add_(grad.to(view.dtype).mul(scale))
        elif grad.dtype == view.dtype and scale != 1.0:
            torch.mul(grad, scale, out=view)
        elif scale_on_device is not None and grad.ndim and torch.promote_types(grad.dtype, view.dtype) == view.dtype:
            torch.mul(grad, scale_on_device, out=view)
        else:
            view.copy_(grad)
            if scale != 1.0:
                view.mul_(scale)
