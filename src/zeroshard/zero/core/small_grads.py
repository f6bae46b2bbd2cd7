"""`SmallGrads`: gradients that go into the flat buffer together, in fewer operations and with the same bits.

[Note: Small gradients]
    Gradients of small parameters wait for each other, and one or two operations take all of them to the flat buffer. A
    block of GPT-2 has 12 parameters, of which 8 are norms and biases. If a buffer has at least three such parameters,
    their gradients wait until all have arrived; then one foreach operation copies them and one scales them, or one adds
    them to the sum of earlier micro-batches. Large gradients are taken as they arrive, so only little memory waits.
    Autograd gives the engine a first gradient alone, but a further one may be a tensor that others have too. These may
    not change it in place; if one does, versions show it, and `RuntimeError` is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroshard.host.torch_internals import add_each, copy_each, scale_each, versions_of
from zeroshard.zero.core.layout import FlatLayout

SMALL_NUMEL = 1 << 16  # most elements of a gradient that waits for others
LITTLE = 4  # small gradients that are at most a quarter of the buffer take little memory beside it
LEAST_TOGETHER = 3  # fewer gradients would need as many operations together as one by one


class SmallGrads:
    """The gradients that wait to be taken to one flat buffer: [Note: Small gradients].

    Args:
        layout: layout of the buffer.
        dtype: dtype of the buffer.

    Attributes:
        waiting: the gradients, by slot.
        num_bytes: their bytes.
        are_little: whether those that may wait are little beside the buffer, so that those of later backwards wait too.
    """

    def __init__(self, layout: FlatLayout, dtype: torch.dtype) -> None:
        self.waiting: dict[int, Tensor] = {}
        self.num_bytes = 0
        self._further: set[int] = set()  # slots that have a sum, to which theirs is added
        self._versions = 0  # of all that wait, as they arrived
        self._layout = layout
        small = [slot.numel for slot in layout.slots if slot.numel <= SMALL_NUMEL]
        self._num_together = len(small) if len(small) >= LEAST_TOGETHER and dtype.is_floating_point else 0
        self.are_little = LITTLE * sum(small) <= layout.numel

    def should_wait(self, grad: Tensor) -> bool:
        """Whether ``grad`` is to wait: it is small, no view of anything larger, and others will follow."""
        if not self._num_together or grad.numel() > SMALL_NUMEL or grad.layout != torch.strided or grad.requires_grad:
            return False
        return grad.is_floating_point() and grad.untyped_storage().nbytes() <= 2 * max(grad.nbytes, 256)

    def defer(self, slot: int, grad: Tensor, views: Sequence[Tensor], scale: float, *, first: bool) -> None:
        """Let the gradient wait, ``first``: of its slot; if it is the last one expected, take all to the buffer."""
        self.waiting[slot] = grad
        self.num_bytes += grad.nbytes
        self._versions += versions_of([grad])
        if not first:
            self._further.add(slot)
        if len(self.waiting) == self._num_together:
            self.copy_in(views, scale)

    def copy_in(self, views: Sequence[Tensor], scale: float) -> None:
        """Copy the waiting gradients into ``views``, the buffer's slots, or add them there, multiplied by ``scale``.

        Raises:
            RuntimeError: one has changed while it waited.
        """
        if not self.waiting:
            return
        waiting, further, versions = self.waiting, self._further, self._versions
        self.clear()
        if versions_of(waiting.values()) != versions:
            names = ", ".join(self._layout.slots[slot].name for slot in waiting)
            raise RuntimeError(
                f"backward: a gradient of these parameters was changed in place after autograd had handed it over: "
                f"{names}; let hooks and backwards of your own return new tensors"
            )
        if first := [slot for slot in waiting if slot not in further]:
            targets = [views[slot] for slot in first]
            copy_each(targets, [waiting[slot] for slot in first])
            if scale != 1.0:
                scale_each(targets, scale)
        if further:
            add_each([views[slot] for slot in further], [waiting[slot] for slot in further], scale)

    def drop(self, slots: Iterable[int]) -> None:
        """Drop the waiting gradients of these slots."""
        for slot in self.waiting.keys() & set(slots):
            grad = self.waiting.pop(slot)
            self.num_bytes -= grad.nbytes
            self._versions -= versions_of([grad])
            self._further.discard(slot)

    def clear(self) -> None:
        """Drop all waiting gradients."""
        self.waiting, self._further, self.num_bytes, self._versions = {}, set(), 0, 0
