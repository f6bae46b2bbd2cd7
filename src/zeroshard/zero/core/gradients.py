"""The gradients of one flat buffer: where micro-batches accumulate, how they become a mean over ranks, and their norm.

There are two buffers. *Local*, ``[padded_numel]``, in the dtype that travels, is the sum of this rank's own gradients.
*Reduced* is the mean over ranks of the part that this rank's optimizer sees, in the dtype of the master weights, or in
bfloat16 if that is what travels. The `grads` column of the stage table says which of them outlives a backward:

* replicate: local stays, and reduced is a view of it, copied out if gradients arrive again before `clear`;
  of one rank and one dtype the sum is the mean, and further gradients are added to it in place (`adds_in_place`);
* shard: local exists from the buffer's first gradient until its reduction; reduced stays.

[Note: The mean]
    Gradients are multiplied by ``1 / world_size``, added to the local buffer, and then summed over ranks: at every
    stage in the same order, hence the same bits. The product is rounded, so that two that cancel leave exactly zero.

[Note: Several collectives]
    With replicas an all-reduce of the shard over the replicate group follows the reduce-scatter. It is issued when that
    is done, at the same place in every rank's order: `issue`. If a gradient arrives between, the sum moves out.

[Note: Unused parameters]
    They contribute zeros. Ranks agree once per backward which had a gradient on any rank; the others' stays None.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, Communicator, Work, empty_for, labelled
from zeroshard.comm.streams import NO_STREAMS, Streams
from zeroshard.host.torch_internals import storage_id
from zeroshard.zero.core.layout import FlatLayout, Piece, view_of
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.reduction import GradientReducer, GradientReduction, PlainReducer
from zeroshard.zero.core.small_grads import SmallGrads
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy


class GradsAway(Protocol):
    """Reduced gradients that wait for the optimizer off the device: `HostGrads`.

    Attributes:
        reduced_now: what has been reduced, wherever it is; nothing is waited for.
        num_bytes: bytes of what is off the device.
    """

    @property
    def reduced_now(self) -> Tensor | None: ...  # noqa: D102

    @property
    def num_bytes(self) -> int: ...  # noqa: D102

    def come_back(self) -> None:
        """Be on the device, where the next reduction adds to what was reduced."""

    def keep(self, arrived: Tensor) -> None:
        """Add what has arrived to what was reduced."""

    def land(self) -> None:
        """Begin to leave the device, as a backward is over."""

    def pieces_there(self, pieces: Sequence[Piece], cuts: list[int]) -> list[Tensor]:
        """As `Gradients.pieces`; values may come later."""
        ...

    def norms_there(self, norm_type: float) -> Tensor:
        """As `Gradients.norms`."""
        ...

    def scale_later(self, factor: Tensor) -> None:
        """As `Gradients.scale`, before anybody reads them."""


class Gradients:
    """Gradients of the parameters of one `FlatLayout`: the local buffer in ``reduce_dtype``, and `reduced`.

    Attributes:
        used: for each slot, whether it had a gradient since it was cleared: here, or once ranks have agreed, on any.
        written: for each slot, whether this rank has a gradient that waits for a reduction.
        unusable: slot -> why no optimizer may step with its gradient, until that is cleared or replaced.
        unusable_now: why gradients that arrive now are unusable; None: they are usable.
        num_backwards: backwards reduced since gradients were cleared.
        has_writes: whether a user has changed unsharded gradients in place, and ranks have not compared that.
        reduced: the mean over ranks of the gradients reduced so far; None before the first reduction.
        offset: of `reduced` in the flat buffer.
        away: where reduced gradients wait, if that is off the device.
        own_slice: the part of the flat buffer that this rank's optimizer sees.
        small: the small gradients that wait to be copied into the local buffer.
        reduction: the reduction in flight.
    """

    away: GradsAway | None = None

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        device: torch.device,
        reduced_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.name, self.layout = name, layout
        self.comm, self.shard_optim = rank_groups.shard_group, strategy.optim is SHARD
        self.reducer: GradientReducer = reducer or PlainReducer(layout, strategy, rank_groups)
        adds_up = self.reducer.running_sum is not None
        self.keep_local = (strategy.grads is not SHARD or self.comm.world_size == 1) and not adds_up  # once reduced
        self.device, self.reduced_dtype, self.reduce_dtype = device, reduced_dtype, reduce_dtype
        alone = rank_groups.world.world_size == 1
        self.adds_in_place = alone and reduce_dtype == reduced_dtype and self.keep_local
        self.used, self.written = [False] * len(layout.slots), [False] * len(layout.slots)
        self.reduced: Tensor | None = None
        start, stop = layout.interval(self.comm.rank) if self.shard_optim else (0, layout.padded_numel)
        self.own_slice, self.offset = slice(start, stop), start
        self.num_backwards, self.has_writes = 0, False
        self.unusable: dict[int, str] = {}
        self.unusable_now: str | None = None
        self._arrives_for = self.comm if adds_up else rank_groups.replicate_group  # which sends what has arrived on
        self._scale = 1.0 / rank_groups.world.world_size
        self._scale_is_exact = math.frexp(self._scale)[0] == 0.5  # a power of two: no product is rounded
        # Whether a foreach product rounds as a single one does: in 16 bits not on a CPU.
        self._scales_alike = self._scale_is_exact or reduce_dtype.itemsize > 2
        self._scale_on_device = self._scale_there()
        dtypes = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128
        self._widened = {each for each in dtypes if torch.promote_types(each, reduce_dtype) == reduce_dtype}
        self.small = SmallGrads(layout, reduce_dtype)
        self._local: Tensor | None = None
        self._views: list[Tensor] = []  # of the local buffer, by slot
        self.reduction: GradientReduction | None = None  # the one in flight; while it is, this is set:
        self._arriving: Tensor
        self._work: Work | None = None  # of its last collective
        self._streams: Streams = NO_STREAMS

    def use_streams(self, streams: Streams) -> None:
        """Issue reductions on these CUDA streams from now on."""
        self._streams = streams

    @property
    def pending(self) -> bool:
        """Whether gradients on this rank wait for a reduction."""
        return any(self.written)

    # -- this rank's sum -------------------------------------------------------------------------------------------

    def accumulate(self, slot: int, grad: Tensor) -> None:
        """Add ``grad`` (the parameter's shape, the compute dtype) to slot ``slot`` of this rank's sum."""
        if self.unusable_now is not None:
            self.unusable[slot] = self.unusable_now
        small = self.small
        if slot in small.waiting:  # an earlier one of this slot
            self.copy_in()
        first = not (self.used if self.adds_in_place else self.written)[slot]
        self._vacate_local()
        views = self._views or self._local_views()
        together = self._scales_alike if first else self._adds_exactly(grad)
        if together and (small.are_little or not self.used[slot]) and small.should_wait(grad):
            small.defer(slot, grad, views, self._scale, first=first)
        else:
            grad = grad.detach() if grad.requires_grad else grad  # under create_graph
            self._add(views[slot], grad.to_dense() if grad.is_sparse else grad, first=first)
        self.written[slot] = self.used[slot] = True

    def _add(self, view: Tensor, grad: Tensor, *, first: bool) -> None:
        """Add ``grad`` to a slot's ``view``, or write it there if it is the first: [Note: The mean].

        All of these have the bits of ``grad.to(view.dtype).mul(scale)``; which one is the fewest operations.
        """
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

    def copy_in(self) -> None:
        """Copy the small gradients that wait into the local buffer, and scale them."""
        self.small.copy_in(self._views, self._scale)

    def local_grad(self, slots: Iterable[int]) -> Tensor | None:
        """This rank's sum in the first of ``slots`` that has one to be reduced; None if none has."""
        slot = next((slot for slot in slots if self.written[slot]), None)
        if slot is None:
            return None
        self.copy_in()
        return self._local_views()[slot]

    def _local_views(self) -> list[Tensor]:
        """The slots of the local buffer, each in its parameter's shape; allocates the buffer if there is none."""
        if self._local is None:
            self._local = empty_for(self.comm, self.layout.padded_numel, self.reduce_dtype, self.device)
            self._views = self.layout.views(self._local)
        return self._views

    def _out_of_local(self, tensor: Tensor) -> Tensor:
        return tensor.clone() if self._local is not None and storage_id(tensor) == storage_id(self._local) else tensor

    def _vacate_local(self) -> None:
        """Before the local buffer is written: move reduced gradients, or a reduction in flight, out of it."""
        if self.reduction is not None:
            if self.reduction.num_left and self._work is not None:  # [Note: Several collectives]
                self._work.wait()
                self._arriving = self._out_of_local(self._arriving)
                return
            self.wait_for_reduce()
        if self.keep_local and self.reduced is not None and not self.adds_in_place and not self.pending:
            self.reduced = self._out_of_local(self.reduced)

    # -- the mean over ranks ---------------------------------------------------------------------------------------

    def reduce(self) -> bool:
        """Start the reduction of the local buffer, with zeros for parameters without a gradient. Collective.

        Returns whether it has more collectives, each of which `issue` issues.
        """
        self.wait_for_reduce()
        self._vacate_local()
        local = self.complete()
        self._arriving = self._target(local)
        with labelled(f"{self.name}/grads"), self._streams.on("reduce", self._streams.mark()):
            self.reduction = self.reducer.begin(local)  # behind the kernels that have written the local buffer
        return self.issue()

    def issue(self) -> bool:
        """Issue the next collective of the reduction in flight, if one is left; return whether more are. Collective.

        A further one reads what the one before it has written, so its stream waits for that; the host does not, nor
        does the stream that computes: [Note: Several collectives].
        """
        reduction, before = self.reduction, self._work
        if reduction is None or not reduction.num_left:
            return False
        with labelled(f"{self.name}/grads"), self._streams.on("reduce" if before is None else "replicate"):
            if before is not None:
                before.wait()
            self._work = self._streams.issued(reduction.issue(self._arriving))
        return reduction.num_left > 0

    def complete(self) -> Tensor:
        """Fill slots without a gradient and the padding with zeros; return the buffer. Nothing is written after it."""
        self.copy_in()
        for view, has_sum in zip(self._local_views(), self.used if self.adds_in_place else self.written, strict=True):
            if not has_sum:
                view.zero_()
        assert self._local is not None
        self.layout.zero_padding(self._local)
        self.written = [False] * len(self.written)
        return self._local

    def _target(self, local: Tensor) -> Tensor:
        """Where the mean of the part of ``local`` that this rank's optimizer sees is to be written.

        If it outlives the local buffer, in its own memory from the beginning.
        """
        running = self.reducer.running_sum
        if running is not None:
            if self.away is not None:
                self.away.come_back()
            running.follow(self.reduced)
        reduced = self.reduced
        if reduced is not None and (running is not None or self.adds_in_place):
            return reduced
        part = local[self.own_slice]
        if running is None and (reduced is not None or self.keep_local or self.reduce_dtype != self.reduced_dtype):
            return part
        return empty_for(self._arrives_for, part.numel(), self.reduced_dtype, part.device)

    def wait_for_reduce(self) -> None:
        """Finish the reduction in flight, if any, and add its result to `reduced`."""
        if self.reduction is None:
            return
        while self.reduction.num_left:
            self.issue()
        assert self._work is not None
        self._work.wait()  # the result is read next, and the local buffer freed
        self.reduction.deliver(self._arriving)
        arrived, self.reduction, self._work = self._arriving, None, None
        del self._arriving
        if self.away is None:
            self.keep_here(arrived)
        else:
            self.away.keep(arrived)
        if not self.keep_local and not self.pending:
            self._local, self._views = None, []

    def keep_here(self, arrived: Tensor) -> None:
        """Add what has arrived to `reduced`."""
        if self.reduced is None:
            arrived = arrived.to(self.reduced_dtype)
            self.reduced = arrived if self.keep_local else self._out_of_local(arrived)
        elif arrived is not self.reduced:  # a reducer may have added to it in place
            self.reduced.add_(arrived)

    def cuts(self, pieces: Sequence[Piece]) -> list[int]:
        """In turn, lengths of the gaps between 1-D pieces of `reduced` and of the pieces; [] if these are unordered."""
        lengths, end = [], self.offset
        for piece in pieces:
            if len(piece.shape) != 1 or piece.offset < end:
                return []
            lengths += [piece.offset - end, piece.shape[0]]
            end = piece.offset + piece.shape[0]
        return [*lengths, self.own_slice.stop - end]

    def pieces(self, pieces: Sequence[Piece], cuts: list[int]) -> list[Tensor]:
        """Views of the reduced gradients of ``pieces``, in their shapes.

        ``cuts``: what `cuts` returned. One operation makes all views of 1-D pieces.
        """
        if self.away is not None:
            return self.away.pieces_there(pieces, cuts)
        reduced = self.reduced
        assert reduced is not None
        if cuts:
            return list(reduced.split(cuts)[1::2])
        return [view_of(reduced, piece.offset - self.offset, piece.shape) for piece in pieces]

    def of_slot(self, slot: int) -> Tensor:
        """This rank's part of the reduced gradient of a slot: a 1-D view."""
        assert self.reduced is not None
        place, own = self.layout.slots[slot], self.own_slice
        start = min(max(place.offset, own.start), own.stop)
        stop = min(max(place.offset + place.numel, start), own.stop)
        return self.reduced[start - own.start : stop - own.start]

    def shards(self) -> list[Tensor]:
        """The reduced gradients on this rank, split by rank and part of the layout, for partial sums of the norm."""
        assert self.reduced is not None
        shards, parts = [self.reduced] if self.shard_optim else self.layout.split(self.reduced), self.layout.parts
        return shards if parts == 1 else [part for shard in shards for part in shard.tensor_split(parts)]

    def norms(self, norm_type: float) -> Tensor:
        """``[len(shards)]``: the p-norm of each of the `shards`, on the device of the weights."""
        if self.away is not None:
            return self.away.norms_there(norm_type)
        return torch.stack([norm_of(shard, norm_type) for shard in self.shards()])

    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by ``factor``, 0-dim."""
        if self.away is not None:
            self.away.scale_later(factor)
        elif self.reduced is not None:
            self.reduced.mul_(factor)

    def clear(self, slots: set[int]) -> None:
        """Drop the gradients of ``slots``; when no slot has one, free all buffers."""
        self.wait_for_reduce()
        self._end_step(slots)
        self.small.drop(slots)
        for slot in slots:
            self.written[slot] = self.used[slot] = False
        if not any(self.used):
            self.reduced, self._local, self._views = None, None, []
            self.num_backwards, self.has_writes = 0, False
            if self.reducer.running_sum is not None:
                self.reducer.running_sum.clear()
        elif self.reduced is not None:
            for slot in slots:
                self.of_slot(slot).zero_()

    def zero(self, slots: set[int]) -> None:
        """Fill the gradients of ``slots`` with zeros, reduced or not; a slot without a gradient still has none."""
        self.wait_for_reduce()
        self._end_step(slots)
        self.copy_in()
        if slots >= {slot for slot, used in enumerate(self.used) if used}:
            self.num_backwards = 0
        for slot in slots:
            if self.written[slot]:
                self._local_views()[slot].zero_()
            if self.reduced is not None:
                self.of_slot(slot).zero_()

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
        reduced = self.reduced if self.away is None else self.away.reduced_now
        return self._local, reduced, None if self.reduction is None else self._arriving

    @property
    def away_bytes(self) -> int:
        """Bytes of those that wait for the optimizer off the device."""
        return 0 if self.away is None else self.away.num_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of all gradient buffers now."""
        held = [tensor for tensor in self.buffers if tensor is not None]
        own = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in held}
        return sum(own.values()) + sum(tensor.nbytes for tensor in self.running_tensors)

    @property
    def running_tensors(self) -> list[Tensor]:
        """What the reducer keeps between reductions."""
        return [] if self.reducer.running_sum is None else self.reducer.running_sum.tensors


# -- norms: from partial norms of shards, with the same bits on each rank ----------------------------------------------


def norm_of(flat: Tensor, norm_type: float) -> Tensor:
    """`torch.linalg.vector_norm`, computed in fp32 for a bfloat16 tensor: bfloat16 keeps only two digits."""
    flat = flat if flat.numel() else flat.new_zeros(1)  # no element has no maximum
    return torch.linalg.vector_norm(flat, norm_type, dtype=torch.float32 if flat.dtype == torch.bfloat16 else None)


def norm_of_partials(partials: Tensor, comm: Communicator | None, norm_type: float) -> Tensor:
    """The norm from float64 partials ``[n]``, or k norms from ``[n, k]``; with ``comm``, each of its ranks has n."""
    if comm is not None:
        rows = partials.new_empty(comm.world_size * len(partials), *partials.shape[1:])
        with labelled(CONTROL):
            comm.all_gather(rows.view(-1), partials.reshape(-1)).wait()
        partials = rows
    return partials.amax(0) if math.isinf(norm_type) else sum(partials[1:], partials[0]) ** (1.0 / norm_type)


def global_norm(grads: Sequence[Gradients], comm: Communicator, norm_type: float, device: torch.device) -> Tensor:
    """The p-norm of all reduced gradients: 0-dim float64, the same bits on every rank and at every stage. Collective.

    It is ``(sum over ranks r of partial_r) ** (1/p)``, in the order of ranks, with ``partial_r = sum over buffers of
    ||shard r||_p ** p``; for p = inf both sums are maxima. If nothing is sharded, each rank computes all partials.
    ``comm`` are the ranks that hold the shards.
    """
    sharded = bool(grads) and grads[0].shard_optim and comm.world_size > 1
    partials = torch.zeros(1, dtype=torch.float64, device=device)
    for buffer in (buffer for buffer in grads if buffer.layout.padded_numel):
        norms = buffer.norms(norm_type).to(partials)
        partials = torch.maximum(partials, norms) if math.isinf(norm_type) else partials + norms**norm_type
    return norm_of_partials(partials, comm if sharded else None, norm_type)


def clip_(grads: Sequence[Gradients], norm: Tensor, max_norm: float) -> None:
    """Scale gradients by ``max_norm / (norm + 1e-6)`` if that is below 1, as torch does; a NaN norm makes them NaN."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient.device.type == "cpu" and coefficient >= 1.0:  # elsewhere reading it would block the host
        return
    factor = coefficient.clamp(max=1.0)
    for buffer in grads:
        buffer.scale(factor)
