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
    is done, at the same place in every rank's order: `reduce_across`. If a gradient arrives between, the sum moves out.

[Note: Unused parameters]
    They contribute zeros. Ranks agree once per backward which had a gradient on any rank; the others' stays None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from zeroshard.comm import CONTROL, Communicator, Work, empty_for, labelled
from zeroshard.comm.streams import NO_STREAMS, Streams
from zeroshard.host.torch_internals import storage_id
from zeroshard.zero.core.layout import FlatLayout, Piece, view_of
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy


class GradientReducer:
    """Begins the reductions of one buffer. Subclasses send gradients in other formats, or sum them in other ways."""

    def __init__(self, layout: FlatLayout, strategy: ShardingStrategy, rank_groups: RankGroups) -> None:
        self.layout, self.everywhere = layout, strategy.optim is not SHARD  # whether every rank needs the whole sum
        self.comm, self.replicate_group = rank_groups.shard_group, rank_groups.replicate_group

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``, whose values are undefined after it. Collective."""
        return GradientReduction(self, local)


class GradientReduction:
    """A reduce-scatter, or an all-reduce if every rank needs the sum; with replicas, then an all-reduce over these."""

    def __init__(self, reducer: GradientReducer, local: Tensor) -> None:
        self._reducer, self._local, self._is_begun = reducer, local, False
        self.num_left = 1 if reducer.replicate_group.world_size == 1 else 2  # collectives that are still to be issued

    def issue(self, target: Tensor) -> Work:
        """Issue the next collective, once the one before it is done."""
        reducer, is_begun, self._is_begun = self._reducer, self._is_begun, True
        self.num_left -= 1
        if is_begun:
            return reducer.replicate_group.all_reduce(target)
        if reducer.everywhere:
            return reducer.layout.all_reduce(reducer.comm, self._local)
        return reducer.layout.reduce(reducer.comm, target, self._local)

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target``, once all collectives are done; here they have written it."""


class Gradients:
    """Gradients of the parameters of one `FlatLayout`: the local buffer in ``reduce_dtype``, and `reduced`.

    Attributes:
        used: for each slot, whether it had a gradient since it was cleared: here, or once ranks have agreed, on any.
        written: for each slot, whether this rank has a gradient that waits for a reduction.
        reduced: the mean over ranks of the gradients reduced so far; None before the first reduction.
        offset: of `reduced` in the flat buffer.
    """

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
        self.reducer = reducer or GradientReducer(layout, strategy, rank_groups)
        self.keep_local = strategy.grads is not SHARD or self.comm.world_size == 1  # after a reduction
        self.device, self.reduced_dtype, self.reduce_dtype = device, reduced_dtype, reduce_dtype
        self.adds_in_place = rank_groups.world.world_size == 1 and reduce_dtype == reduced_dtype
        self.used, self.written = [False] * len(layout.slots), [False] * len(layout.slots)
        self.reduced: Tensor | None = None
        start, stop = layout.interval(self.comm.rank) if self.shard_optim else (0, layout.padded_numel)
        self._own_slice, self.offset = slice(start, stop), start
        self._scale = 1.0 / rank_groups.world.world_size
        self._local: Tensor | None = None
        self._views: list[Tensor] = []  # of the local buffer, by slot
        self._reduction: GradientReduction | None = None  # the one in flight; while it is, these two are set:
        self._arriving: Tensor
        self._work: Work
        self._streams: Streams = NO_STREAMS

    def use_streams(self, streams: Streams) -> None:
        """Issue reductions on these CUDA streams from now on."""
        self._streams = streams

    @property
    def pending(self) -> bool:
        """Whether gradients on this rank wait for a reduction."""
        return any(self.written)

    def accumulate(self, slot: int, grad: Tensor) -> None:
        """Add ``grad`` (the parameter's shape, the compute dtype) to slot ``slot`` of this rank's sum."""
        grad = grad.detach() if grad.requires_grad else grad  # under create_graph
        self._vacate_local()
        view = (self._views or self._local_views())[slot]
        self._add(view, grad.to_dense() if grad.is_sparse else grad, first=not self._has_sum()[slot])
        self.written[slot] = self.used[slot] = True

    def _has_sum(self) -> list[bool]:
        """For each slot, whether further gradients are added to what the local buffer has there."""
        return self.used if self.adds_in_place else self.written

    def _add(self, view: Tensor, grad: Tensor, *, first: bool) -> None:
        """Add ``grad`` to a slot's ``view``, or write it there if it is the first: [Note: The mean]."""
        scaled = grad.to(view.dtype).mul(self._scale)
        view.copy_(scaled) if first else view.add_(scaled)

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
        if self._reduction is not None:
            if self._reduction.num_left:  # [Note: Several collectives]
                self._work.wait()
                self._arriving = self._out_of_local(self._arriving)
                return
            self.wait_for_reduce()
        if self.keep_local and self.reduced is not None and not self.adds_in_place and not self.pending:
            self.reduced = self._out_of_local(self.reduced)

    def reduce(self) -> None:
        """Start the reduction of the local buffer, with zeros for parameters without a gradient. Collective."""
        self.wait_for_reduce()
        self._vacate_local()
        local = self._complete()
        self._arriving = self._target(local)
        with labelled(f"{self.name}/grads"), self._streams.on("reduce", self._streams.mark()):
            reduction = self.reducer.begin(local)
            self._work = self._streams.issued(reduction.issue(self._arriving))
        self._reduction = reduction

    def _complete(self) -> Tensor:
        """Fill slots without a gradient and the padding with zeros; return the buffer. Nothing is written after it."""
        for view, has_sum in zip(self._local_views(), self._has_sum(), strict=True):
            if not has_sum:
                view.zero_()
        assert self._local is not None
        self.layout.zero_padding(self._local)
        self.written = [False] * len(self.written)
        return self._local

    def _target(self, local: Tensor) -> Tensor:
        """Where the mean of the part of ``local`` that this rank's optimizer sees is to be written."""
        return local[self._own_slice] if self.reduced is None or not self.adds_in_place else self.reduced

    @property
    def has_collectives_left(self) -> bool:
        """Whether the reduction in flight still has collectives to issue, by `reduce_across`."""
        return self._reduction is not None and self._reduction.num_left > 0

    def reduce_across(self) -> None:
        """Issue the next collective of the reduction in flight, if any: [Note: Several collectives]. Collective."""
        if self._reduction is None or not self._reduction.num_left:
            return
        with labelled(f"{self.name}/grads"), self._streams.on("replicate"):
            self._work.wait()
            self._work = self._streams.issued(self._reduction.issue(self._arriving))

    def wait_for_reduce(self) -> None:
        """Finish the reduction in flight, if any, and add its result to `reduced`."""
        if self._reduction is None:
            return
        while self._reduction.num_left:
            self.reduce_across()
        self._work.wait()
        self._reduction.deliver(self._arriving)
        arrived, self._reduction = self._arriving, None
        del self._arriving, self._work
        self._keep(arrived)
        if not self.keep_local and not self.pending:
            self._local, self._views = None, []

    def _keep(self, arrived: Tensor) -> None:
        """Add what has arrived to `reduced`."""
        if self.reduced is None:
            arrived = arrived.to(self.reduced_dtype)
            self.reduced = arrived if self.keep_local else self._out_of_local(arrived)
        elif arrived is not self.reduced:  # a reducer may have added to it in place
            self.reduced.add_(arrived)

    def piece(self, piece: Piece) -> Tensor:
        """The reduced gradients of a piece: a view, in the piece's shape."""
        assert self.reduced is not None
        return view_of(self.reduced, piece.offset - self.offset, piece.shape)

    def shards(self) -> list[Tensor]:
        """The reduced gradients on this rank, split by rank, for partial sums of the norm."""
        assert self.reduced is not None
        return [self.reduced] if self.shard_optim else self.layout.split(self.reduced)

    def norms(self, norm_type: float) -> Tensor:
        """``[len(shards)]``: the p-norm of each of the `shards`, on the device of the weights."""
        return torch.stack([norm_of(shard, norm_type) for shard in self.shards()])

    def scale(self, factor: Tensor) -> None:
        """Multiply the reduced gradients by ``factor``, 0-dim."""
        if self.reduced is not None:
            self.reduced.mul_(factor)

    def clear(self, slots: set[int]) -> None:
        """Drop the gradients of ``slots``; when no slot has one, free all buffers."""
        self.wait_for_reduce()
        for slot in slots:
            self.written[slot] = self.used[slot] = False
        if not any(self.used):
            self.reduced, self._local, self._views = None, None, []
        elif self.reduced is not None:
            for piece in self.layout.pieces(self._own_slice.start, self._own_slice.stop):
                if piece.slot in slots:
                    self.piece(piece).zero_()


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


def clip_(grads: Sequence[Gradients], norm: Tensor, max_norm: float) -> None:
    """Scale gradients by ``max_norm / (norm + 1e-6)`` if that is below 1, as torch does; a NaN norm makes them NaN."""
    coefficient = max_norm / (norm + 1e-6)
    if coefficient.device.type == "cpu" and coefficient >= 1.0:  # elsewhere reading it would block the host
        return
    factor = coefficient.clamp(max=1.0)
    for buffer in grads:
        buffer.scale(factor)
