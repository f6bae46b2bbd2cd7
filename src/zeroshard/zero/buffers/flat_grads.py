"""`FlatGrads`: the gradients of one flat buffer as the engine needs them.

To `Gradients` it adds fewer operations for the local sum, with the same bits; reducers that keep something
(`StatefulReducer`); gradients that a user reads, replaces or sets to zero one by one; and gradients with which no
optimizer may step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor

from zeroshard.comm import empty_for
from zeroshard.host.torch_internals import storage_id
from zeroshard.zero.buffers.flat_layout import FlatLayout
from zeroshard.zero.buffers.reduction import StatefulReducer
from zeroshard.zero.buffers.small_grads import SmallGrads
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.layout import Piece
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.rank_groups import RankGroups


class FlatGrads(Gradients):
    """Gradients for the parameters of one `FlatLayout`; arguments as of `Gradients`.

    Attributes:
        unusable: slot -> why no optimizer may step with its gradient, until that is cleared or replaced.
        unusable_now: why gradients that arrive now are unusable; None: they are usable.
        num_backwards: backwards reduced since gradients were cleared.
        has_writes: whether a user has changed unsharded gradients in place, and ranks have not compared that.
    """

    layout: FlatLayout
    reducer: StatefulReducer

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        device: torch.device,
        reduced_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reducer: StatefulReducer | None = None,
    ) -> None:
        reducer = reducer or StatefulReducer(layout, strategy, rank_groups)
        super().__init__(name, layout, strategy, rank_groups, device, reduced_dtype, reduce_dtype, reducer)
        self.keep_local = self.keep_local and not reducer.accumulates
        self.adds_in_place = self.adds_in_place and self.keep_local
        self.num_backwards, self.has_writes = 0, False
        self.unusable, self.unusable_now = dict[int, str](), cast("str | None", None)
        self._small = SmallGrads(layout, reduce_dtype)
        self._scale_is_exact = math.frexp(self._scale)[0] == 0.5  # a power of two: no product is rounded
        # Whether a foreach product rounds as a single one does: in 16 bits not on a CPU.
        self._scales_alike = self._scale_is_exact or reduce_dtype.itemsize > 2
        self._scale_on_device = self._scale_there()
        dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
        self._widened = {each for each in dtypes if torch.promote_types(each, reduce_dtype) == reduce_dtype}

    # -- this rank's sum -------------------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        """Bytes of small gradients that wait to be copied into the local buffer."""
        return self._small.num_bytes

    def accumulate(self, slot: int, grad: Tensor) -> None:
        """Add ``grad`` (the parameter's shape, the compute dtype) to slot ``slot`` of this rank's sum."""
        small = self._small
        if self.unusable_now is not None:
            self.unusable[slot] = self.unusable_now
        if slot in small.waiting:  # an earlier one of this slot
            self._copy_in()
        first = not self._has_sum()[slot]
        together = self._scales_alike if first else self._adds_exactly(grad)
        if together and (small.are_little or not self.used[slot]) and small.should_wait(grad):
            self._vacate_local()
            small.defer(slot, grad, self._views or self._local_views(), self._scale, first=first)
            self.written[slot] = self.used[slot] = True
            return
        super().accumulate(slot, grad)

    def local_grad(self, slots: Iterable[int]) -> Tensor | None:
        """This rank's sum in the first of ``slots`` that has one to be reduced; None if none has."""
        slot = next((slot for slot in slots if self.written[slot]), None)
        if slot is None:
            return None
        self._copy_in()
        return self._local_views()[slot]

    def _add(self, view: Tensor, grad: Tensor, *, first: bool) -> None:
        if not first:
            if self._adds_exactly(grad):
                view.add_(grad, alpha=self._scale)
            else:
                view.add_(grad.to(view.dtype).mul(self._scale))
        elif grad.dtype == view.dtype and self._scale != 1.0:
            torch.mul(grad, self._scale, out=view)
        elif self._scale_on_device is not None and grad.ndim and grad.dtype in self._widened:
            torch.mul(grad, self._scale_on_device, out=view)
        else:
            view.copy_(grad)
            if self._scale != 1.0:
                view.mul_(self._scale)

    def _adds_exactly(self, grad: Tensor) -> bool:
        """Whether one addition rounds no product: the scale is a power of two, and the buffer is no narrower."""
        return self._scale_is_exact and grad.dtype in self._widened

    def _scale_there(self) -> Tensor | None:
        """The scale as a tensor ``[1]`` in the dtype that travels, by which one kernel widens and scales a gradient.

        Multiplied by a Python number, the product would be rounded to the gradient's dtype. Only on a GPU, whose
        kernels widen as they read; a CPU would first make a wide copy of the gradient, so there the gradient is copied
        into place and multiplied there. Both give the same bits.
        """
        if self.device.type != "cuda" or self._scale == 1.0 or not self.reduce_dtype.is_floating_point:
            return None
        return torch.tensor([self._scale], dtype=self.reduce_dtype, device=self.device)

    def _copy_in(self) -> None:
        """Copy the small gradients that wait into the local buffer, and scale them."""
        self._small.copy_in(self._views, self._scale)

    def _complete(self) -> Tensor:
        self._copy_in()
        return super()._complete()

    # -- the mean over ranks ---------------------------------------------------------------------------------------

    def _target(self, local: Tensor) -> Tensor:
        """Where the mean is to be written: if it outlives the local buffer, in its own memory from the beginning."""
        part, comm = super()._target(local), self.reducer.replicate_group
        if self.reducer.accumulates:
            self.reducer.follow(self.reduced)
            if self.reduced is not None:
                return self.reduced
            comm = self.comm
        elif self.reduced is not None or self.keep_local or self.reduce_dtype != self.reduced_dtype:
            return part
        return empty_for(comm, part.numel(), self.reduced_dtype, part.device)

    # -- what a user reads, replaces, or sets to zero --------------------------------------------------------------

    def cuts(self, pieces: Sequence[Piece]) -> list[int]:
        """In turn, lengths of the gaps between 1-D pieces of `reduced` and of the pieces; [] if these are unordered."""
        lengths, end = [], self.offset
        for piece in pieces:
            if len(piece.shape) != 1 or piece.offset < end:
                return []
            lengths += [piece.offset - end, piece.shape[0]]
            end = piece.offset + piece.shape[0]
        return [*lengths, self._own_slice.stop - end]

    def pieces(self, pieces: Sequence[Piece], cuts: list[int]) -> list[Tensor]:
        """`piece` of all of them; ``cuts``: what `cuts` returned. One operation makes all views of 1-D pieces."""
        assert self.reduced is not None
        return list(self.reduced.split(cuts)[1::2]) if cuts else [self.piece(piece) for piece in pieces]

    def of_slot(self, slot: int) -> Tensor:
        """This rank's part of the reduced gradient of a slot: a 1-D view."""
        assert self.reduced is not None
        place, own = self.layout.slots[slot], self._own_slice
        start = min(max(place.offset, own.start), own.stop)
        stop = min(max(place.offset + place.numel, start), own.stop)
        return self.reduced[start - own.start : stop - own.start]

    def put(self, slot: int, part: Tensor) -> None:
        """Replace this rank's part of the gradient of ``slot`` by ``part``."""
        self.wait_for_reduce()
        self._copy_in()
        if self.reduced is None and self.adds_in_place:
            self.reduced = self._target(self._complete())
        elif self.reduced is None:
            numel = self._own_slice.stop - self._own_slice.start
            self.reduced = torch.zeros(numel, dtype=self.reduced_dtype, device=self.device)
        self.of_slot(slot).copy_(part)
        self.written[slot], self.used[slot] = False, True
        self.unusable.pop(slot, None)

    def shards(self) -> list[Tensor]:
        """The reduced gradients on this rank, split by rank and part of the layout, for partial sums of the norm."""
        return [part for shard in super().shards() for part in shard.tensor_split(self.layout.parts)]

    def zero(self, slots: set[int]) -> None:
        """Fill the gradients of ``slots`` with zeros, reduced or not; a slot without a gradient still has none."""
        self.wait_for_reduce()
        self._end_step(slots)
        self._copy_in()
        if slots >= {slot for slot, used in enumerate(self.used) if used}:
            self.num_backwards = 0
        for slot in slots:
            if self.written[slot]:
                self._local_views()[slot].zero_()
            if self.reduced is not None:
                self.of_slot(slot).zero_()

    def clear(self, slots: set[int]) -> None:
        """Drop the gradients of ``slots``; when no slot has one, free all buffers."""
        self.wait_for_reduce()
        self._end_step(slots)
        self._small.drop(slots)
        super().clear(slots)
        if not any(self.used):
            self.num_backwards, self.has_writes = 0, False
            self.reducer.clear()

    def _end_step(self, slots: set[int]) -> None:
        if self.reducer.rounding is not None:
            self.reducer.rounding.end_step()
        if self.unusable:
            self.unusable = {slot: why for slot, why in self.unusable.items() if slot not in slots}

    # -- memory ----------------------------------------------------------------------------------------------------

    @property
    def buffers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The local buffer, `reduced`, and the target of the reduction in flight, whose values may still change.

        They may share memory.
        """
        return self._local, self.reduced, None if self._reduction is None else self._arriving

    @property
    def packed(self) -> Tensor | None:
        """The buffer of gradients that arrive elsewhere than in their target, until they have been added up."""
        return getattr(self._reduction, "packed", None)

    @property
    def away_bytes(self) -> int:
        """Bytes of those that wait for the optimizer off the device."""
        return 0

    @property
    def resident_bytes(self) -> int:
        """Bytes of all gradient buffers now."""
        held = [tensor for tensor in self.buffers if tensor is not None]
        own = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in held}
        return sum(own.values()) + sum(tensor.nbytes for tensor in self.reducer.tensors)


def mark_unusable(buffers: Iterable[FlatGrads], whose: str | None, where: str) -> None:
    """Let no optimizer step by gradients that arrive while other values are in the weights' place for a block.

    ``whose``: the values whose gradients these are, such as "the global weights"; None: the weights are back.
    ``where``: the block, as the user writes it: ``ema.weights()`` or ``local_steps.global_weights()``.
    """
    why = (
        f"these are gradients of {whose}, from a backward inside {where}; call zero_grad() after reading them, and run "
        f"the backward of a step outside {where}"
    )
    for each in buffers:
        each.unusable_now = None if whose is None else why
