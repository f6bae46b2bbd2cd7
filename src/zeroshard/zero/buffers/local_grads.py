"""This rank's own sum of gradients in one flat buffer: ``[padded_numel]``, in the dtype that travels.

[Note: The mean]
    Gradients are scaled by ``1 / world_size`` while they are copied into the buffer, and then summed over ranks. Every
    stage does so, and reduces the same buffer in the same order, hence the same bits. If the factor is no power of two,
    the product is rounded before it is added to the buffer, so that gradients of two micro-batches that cancel leave
    exactly zero, as they would unscaled.

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

import torch
from torch import Tensor

from zeroshard.comm import Communicator, empty_for
from zeroshard.torch_internals import copy_each, scale_each, storage_id
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
        if not self._num_together or grad.numel() > SMALL_NUMEL or grad.layout != torch.strided:
            return False
        return grad.is_floating_point() and grad.untyped_storage().nbytes() <= 2 * max(grad.nbytes, 256)

    def defer(self, slot: int, grad: Tensor, views: Sequence[Tensor], scale: float) -> None:
        """Let the gradient wait; if it is the last one expected, copy all into the buffer."""
        self._waiting[slot] = grad
        self.num_bytes += grad.nbytes
        if len(self._waiting) == self._num_together:
            self.copy_in(views, scale)

    def __contains__(self, slot: int) -> bool:
        return slot in self._waiting

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


class LocalGrads:
    """The sums of this rank's gradients, scaled, of the parameters of one `FlatLayout`.

    Args:
        layout: where each parameter's gradient lies.
        comm: which allocates the buffer.
        dtype, device: of the buffer.
        world_size: ranks over which gradients will be summed; each is multiplied by ``1 / world_size``.

    Attributes:
        buffer: ``[padded_numel]``; None until the first gradient, and after `free`.
        written: for each slot, whether a gradient lies there, or waits to be copied there.
        scale: ``1 / world_size``.
    """

    def __init__(
        self, layout: FlatLayout, comm: Communicator, dtype: torch.dtype, device: torch.device, world_size: int
    ) -> None:
        self._layout, self._comm, self._dtype, self._device = layout, comm, dtype, device
        self.buffer: Tensor | None = None
        self._views: list[Tensor] = []
        self.written = [False] * len(layout.slots)
        self._small = SmallGrads(layout, dtype)
        self.scale = 1.0 / world_size
        self._scale_is_exact = math.frexp(self.scale)[0] == 0.5
        self._scale_on_device = self._scale_there()

    @property
    def pending(self) -> bool:
        """Whether gradients wait for a reduction."""
        return any(self.written)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of small gradients that wait to be copied into the buffer."""
        return self._small.num_bytes

    def contains(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` shares the buffer's memory."""
        return self.buffer is not None and storage_id(tensor) == storage_id(self.buffer)

    def views(self) -> list[Tensor]:
        """The slots of the buffer, each in its parameter's shape; allocates the buffer if there is none."""
        if self.buffer is None:
            self.buffer = empty_for(self._comm, self._layout.padded_numel, self._dtype, self._device)
            self._views = self._layout.views(self.buffer)
        return self._views

    def accumulate(self, slot: int, grad: Tensor, *, first: bool) -> None:
        """Add ``grad``, in the parameter's shape, to the sum; ``first``: no other has come since they were cleared."""
        view = self.views()[slot]
        if first and self._small.should_wait(grad):
            self.written[slot] = True
            self._small.defer(slot, grad, self._views, self.scale)
            return
        if slot in self._small:
            self.copy_in()
        if self.written[slot] and self._scale_is_exact:
            view.add_(grad, alpha=self.scale)
        elif self.written[slot]:
            view.add_(grad.to(view.dtype).mul(self.scale))
        elif grad.dtype == view.dtype and self.scale != 1.0:
            torch.mul(grad, self.scale, out=view)
        elif (
            self._scale_on_device is not None
            and grad.ndim
            and torch.promote_types(grad.dtype, view.dtype) == view.dtype
        ):
            torch.mul(grad, self._scale_on_device, out=view)
        else:
            view.copy_(grad)
            if self.scale != 1.0:
                view.mul_(self.scale)
        self.written[slot] = True

    def copy_in(self) -> None:
        """Copy the small gradients that wait into the buffer, and scale them."""
        self._small.copy_in(self._views, self.scale)

    def _scale_there(self) -> Tensor | None:
        """The scale as a tensor ``[1]`` in the dtype that travels, by which one kernel widens and scales a gradient.

        Multiplied by a Python number, the product would be rounded to the gradient's dtype. Only on a GPU, whose
        kernels widen as they read; a CPU would first make a wide copy of the gradient, so there the gradient is copied
        into place and multiplied there. Both give the same bits.
        """
        if self._device.type != "cuda" or self.scale == 1.0 or not self._dtype.is_floating_point:
            return None
        return torch.tensor([self.scale], dtype=self._dtype, device=self._device)

    def complete(self) -> Tensor:
        """Fill slots without a gradient and the padding with zeros; return the buffer. Nothing is written after it."""
        views = self.views()
        self.copy_in()
        for view, written in zip(views, self.written, strict=True):
            if not written:
                view.zero_()
        assert self.buffer is not None
        self._layout.zero_padding(self.buffer)
        self.written = [False] * len(self.written)
        return self.buffer

    def zero(self, slot: int) -> None:
        """Fill the gradient of ``slot`` with zeros, if there is one."""
        if self.written[slot]:
            self.views()[slot].zero_()

    def free(self) -> None:
        """Free the buffer."""
        self.buffer, self._views = None, []

    def clear(self) -> None:
        """Free the buffer, and drop the gradients that wait to be copied there."""
        self.free()
        self._small.clear()
