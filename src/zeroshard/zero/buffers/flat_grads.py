"""The gradients of one flat buffer: where micro-batches accumulate, and how they become a mean over ranks.

There are two buffers. *Local*, ``[padded_numel]``, in the dtype that travels, is the sum of this rank's own gradients
(`local_grads`). *Reduced* is the mean over ranks of the part that this rank's optimizer sees, in the dtype of the
master weights, or in bfloat16 if that is what travels (`MixedPrecision.reduced_dtype`). The `grads` column says which
outlives a backward:

* replicate: local stays. After a reduction, reduced is a view of it, not a second buffer. Only if gradients arrive
  again before the optimizer has stepped is reduced copied to its own memory.
* shard: local exists from the unit's first gradient until its reduction; reduced stays.

Both are freed when gradients are cleared (``zero_grad()``); ``zero_grad(set_to_none=False)`` fills them with zeros.

[Note: Several collectives]
    How the local buffer becomes the reduced shard is the business of a `GradientReducer`. A reduction may take several
    collectives: with replicas (see `rank_groups`) the reduce-scatter in the shard group is followed by an all-reduce of
    the shard over the replicate group. Each is issued when the one before it is done, at the same place in every rank's
    order: the code that walks the schedule calls `reduce_across` there. If another gradient arrives between two of
    them, the first sum is copied out of the local buffer. A reducer may accumulate (`ExactReducer`): then every
    backward is reduced, at every stage, and *reduced* is its sum.

[Note: Unused parameters]
    A parameter without a gradient on this rank contributes zeros. Ranks agree once per backward which parameters had a
    gradient on any rank (see `Zero`); for the others the optimizer sees None, as in one process.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import Work, empty_for, labelled
from zeroshard.comm.streams import NO_STREAMS, Streams
from zeroshard.torch_internals import storage_id
from zeroshard.zero.buffers.flat_layout import FlatLayout
from zeroshard.zero.buffers.local_grads import LocalGrads
from zeroshard.zero.buffers.reduction import GradientReducer, GradientReduction
from zeroshard.zero.buffers.unusable_grads import UnusableGrads
from zeroshard.zero.core.layout import Piece, view_of
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.rank_groups import RankGroups


class FlatGrads:
    """Gradients for the parameters of one `FlatLayout`.

    Attributes:
        used: for each slot, whether it has had a gradient since the last `clear`: on this rank, and once the ranks have
            agreed, on any rank.
        reduced: the mean over ranks of the gradients reduced so far; None before the first reduction.
        unusable: gradients with which no optimizer may step.
        reducer: begins the reductions.
        num_backwards: backwards reduced since gradients were cleared.
    """

    def __init__(
        self,
        name: str,
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        *,
        device: torch.device,
        reduced_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        reducer: GradientReducer | None = None,
    ) -> None:
        self.name = name
        self.layout = layout
        self.comm = comm = rank_groups.shard_group
        self.shard_optim = strategy.optim is SHARD
        self.num_backwards = 0
        plain = GradientReducer(comm, rank_groups.replicate_group, layout, everywhere=not self.shard_optim)
        self.reducer = plain if reducer is None else reducer
        self.keep_local = (strategy.grads is not SHARD or comm.world_size == 1) and not self.reducer.accumulates
        self.device, self.reduced_dtype, self.reduce_dtype = device, reduced_dtype, reduce_dtype
        self.used = [False] * len(layout.slots)
        self.unusable = UnusableGrads()
        self.reduced: Tensor | None = None
        self._local = LocalGrads(layout, comm, reduce_dtype, device, rank_groups.world.world_size)
        self._work: Work | None = None
        self._arriving: Tensor | None = None
        self._reduction: GradientReduction | None = None  # the one in flight
        self._streams: Streams = NO_STREAMS
        start, stop = layout.interval(comm.rank)
        self._own_slice = slice(start, stop) if self.shard_optim else slice(0, layout.padded_numel)
        self.offset = self._own_slice.start  # of `reduced` in the flat buffer

    def use_streams(self, streams: Streams) -> None:
        """Issue reductions on these CUDA streams from now on."""
        self._streams = streams

    # -- accumulation -----------------------------------------------------------------------------------------

    @property
    def pending(self) -> bool:
        """Whether gradients on this rank wait for a reduction."""
        return self._local.pending

    @property
    def waiting_bytes(self) -> int:
        """Bytes of small gradients that wait to be copied into the local buffer."""
        return self._local.waiting_bytes

    def accumulate(self, slot: int, grad: Tensor) -> None:
        """Add ``grad`` (the parameter's shape, the compute dtype) to slot ``slot`` of this rank's sum."""
        if grad.requires_grad:  # under create_graph
            grad = grad.detach()
        if grad.is_sparse:
            grad = grad.to_dense()
        self._vacate_local()
        self.unusable.record_added(slot)
        self._local.accumulate(slot, grad, first=not self.used[slot])
        self.used[slot] = True

    def _vacate_local(self) -> None:
        """Before the local buffer is written: move reduced gradients, or a reduction in flight, out of it."""
        if self._work is None and self.reduced is None:
            return
        if self.has_collectives_left:  # [Note: Several collectives]
            assert self._work is not None
            assert self._arriving is not None
            self._work.wait()
            if self._local.contains(self._arriving):
                self._arriving = self._arriving.clone()
            return
        self.wait_for_reduce()
        if self.reduced is not None and self.keep_local and not self.pending and self._local.contains(self.reduced):
            self.reduced = self.reduced.clone()

    # -- reduction --------------------------------------------------------------------------------------------

    def reduce(self) -> None:
        """Start the reduction of the local buffer, with zeros for parameters without a gradient. Collective."""
        self._reduce_the_rest()
        self._vacate_local()
        local = self._local.complete()
        self._arriving = target = self.reducer.target(self.reduced, lambda: self._target(local))
        with labelled(f"{self.name}/grads"), self._streams.on("reduce", self._streams.mark()):
            self._reduction = self.reducer.begin(local)
            self._work = self._streams.issued(self._reduction.issue(target))

    def _target(self, local: Tensor) -> Tensor:
        """Where the mean of the part of ``local`` that this rank's optimizer sees is to be written."""
        part = local[self._own_slice]
        if self.reducer.accumulates or (
            self.reduced is None and not self.keep_local and self.reduce_dtype == self.reduced_dtype
        ):
            # It outlives the local buffer, so it gets its own memory.
            comm = self.comm if self.reducer.accumulates else self.reducer.replicate_group
            return empty_for(comm, part.numel(), self.reduced_dtype, part.device)
        return part

    @property
    def has_collectives_left(self) -> bool:
        """Whether the reduction in flight still has collectives to issue, by `reduce_across`."""
        return self._reduction is not None and self._reduction.num_left > 0

    def _reduce_the_rest(self) -> None:
        while self.has_collectives_left:
            self.reduce_across()

    def reduce_across(self) -> None:
        """Issue the next collective of the reduction in flight, if any: [Note: Several collectives]. Collective."""
        if self._reduction is None or not self._reduction.num_left:
            return
        assert self._work is not None
        assert self._arriving is not None
        with labelled(f"{self.name}/grads"), self._streams.on("replicate"):
            self._work.wait()
            self._work = self._streams.issued(self._reduction.issue(self._arriving))

    def wait_for_reduce(self) -> None:
        """Finish the reduction in flight, if any, and add its result to `reduced`."""
        if self._work is None:
            return
        self._reduce_the_rest()
        self._work.wait()
        arrived, self._work, self._arriving = self._arriving, None, None
        reduction, self._reduction = self._reduction, None
        assert arrived is not None
        assert reduction is not None
        reduction.deliver(arrived)
        if self.reducer.accumulates:
            self.reduced = arrived
        elif self.reduced is not None:
            self.reduced.add_(arrived)
        else:
            self.reduced = arrived.to(self.reduced_dtype)
            if not self.keep_local and self._local.contains(self.reduced):
                self.reduced = self.reduced.clone()
        if not self.keep_local and not self.pending:
            self._local.free()

    # -- what the engine reads --------------------------------------------------------------------------------

    def piece(self, piece: Piece) -> Tensor:
        """The reduced gradients of a piece: a view, in the piece's shape."""
        assert self.reduced is not None
        return view_of(self.reduced, piece.offset - self.offset, piece.shape)

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
        start, stop = self._own_slice_of(slot)
        return self.reduced[start:stop]

    def put(self, slot: int, part: Tensor) -> None:
        """Replace this rank's part of the gradient of ``slot`` by ``part``."""
        self.wait_for_reduce()
        self._local.copy_in()
        if self.reduced is None:
            numel = self._own_slice.stop - self._own_slice.start
            self.reduced = torch.zeros(numel, dtype=self.reduced_dtype, device=self.device)
        start, stop = self._own_slice_of(slot)
        self.reduced[start:stop].copy_(part)
        self._local.written[slot], self.used[slot] = False, True
        self.unusable.forget({slot})

    def _own_slice_of(self, slot: int) -> tuple[int, int]:
        place = self.layout.slots[slot]
        start = min(max(place.offset - self.offset, 0), self._own_slice.stop - self.offset)
        return start, min(max(place.offset + place.numel - self.offset, start), self._own_slice.stop - self.offset)

    def shards(self) -> list[Tensor]:
        """The reduced gradients on this rank, split by rank and part of the layout, for partial sums of the norm."""
        assert self.reduced is not None
        shards = [self.reduced] if self.shard_optim else self.layout.split(self.reduced)
        if self.layout.parts == 1:
            return shards
        return [part for shard in shards for part in shard.tensor_split(self.layout.parts)]

    def zero(self, slots: set[int]) -> None:
        """Fill the gradients of ``slots`` with zeros, reduced or not; a slot without a gradient still has none."""
        self.wait_for_reduce()
        self.reducer.end_step()
        self.unusable.forget(slots)
        self._local.copy_in()
        if slots >= {slot for slot, used in enumerate(self.used) if used}:
            self.num_backwards = 0
        for slot in slots:
            self._local.zero(slot)
        if self.reduced is not None:
            for piece in self._pieces():
                if piece.slot in slots:
                    self.piece(piece).zero_()

    def clear(self, slots: set[int]) -> None:
        """Drop the gradients of ``slots``; when no slot has one, free all buffers."""
        self.wait_for_reduce()
        self.reducer.end_step()
        self.unusable.forget(slots)
        for slot in slots:
            self._local.written[slot] = self.used[slot] = False
        if not any(self.used):
            self.reduced = None
            self.num_backwards = 0
            self._local.clear()
            self.reducer.clear()
            return
        self.zero(slots)

    def _pieces(self) -> list[Piece]:
        ranks = [self.comm.rank] if self.shard_optim else range(self.comm.world_size)
        return [piece for rank in ranks for piece in self.layout.owned(rank)]

    @property
    def buffers(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The local buffer, `reduced`, and the target of the reduction in flight; they may share memory."""
        return self._local.buffer, self.reduced, self._arriving

    @property
    def packed(self) -> Tensor | None:
        """The buffer of gradients that arrive elsewhere than in their target, until they have been added up."""
        return None if self._reduction is None else self._reduction.packed

    @property
    def resident_bytes(self) -> int:
        """Bytes of all gradient buffers now."""
        held = [tensor for tensor in self.buffers if tensor is not None]
        own = {storage_id(tensor): tensor.untyped_storage().nbytes() for tensor in held}
        return sum(own.values()) + sum(tensor.nbytes for tensor in self.reducer.tensors)
