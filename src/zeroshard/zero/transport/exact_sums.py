"""Sums of gradients that have the same bits on any number of ranks.

A floating-point sum depends on the order of its terms, and the order changes with the number of ranks: one rank adds up
the gradients of its micro-batches, several ranks reduce theirs. With `Zero(reproducible=)` no sum is rounded until all
terms are added up. So the result depends neither on the order nor on which rank computed which micro-batch::

    local       [W * n]   this rank's gradient of one micro-batch, in ``reduce_dtype``
    all-to-all  [W, n]    every rank's gradient of this rank's shard
    total       [n] x 2   sum and compensation (the rounding errors of all additions), in float64

The total is rounded once, to the gradient's dtype. Two float64 hold 106 bits. For fp32 numbers, which have 24, a bit is
lost only if terms of one element differ by a factor of 2**80 and the larger ones cancel. Shards are laid out, cut into
pieces and added up for the norm as on ``reproducible`` ranks (`FlatLayout.parts`), whatever the number of ranks is.

Ranks exchange each micro-batch, as at stage 2. If they first added up their own, they would have to send two float64.

Knuth 1969, The Art of Computer Programming 2, section 4.2.2, theorem B: the error of an addition is a number of the
same format; Dekker 1971, https://doi.org/10.1007/BF01397083. Demmel and Nguyen 2015, "Parallel Reproducible
Summation", https://doi.org/10.1109/TC.2014.2345391, explain why parallel sums need this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, all_to_all, empty_for
from zeroshard.comm.base import DONE
from zeroshard.zero.buffers.reduction import StatefulReducer
from zeroshard.zero.core.gradients import GradientReduction
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.rank_groups import RankGroups

CHUNK_NUMEL = {"cpu": 1 << 15}
"""Elements that are added at a time, by type of device: on a CPU five operands in float64 fit into a core's cache."""
OTHER_CHUNK_NUMEL = 1 << 20  # so many that a GPU's launch overhead is negligible


class ExactGradientSum:
    """A sum of tensors ``[n]`` that is rounded when it is read.

    Args:
        numel, dtype, device: n, and the dtype and device of the terms.
        chunk_numel: elements that are added at a time; each call allocates three times as many in float64.

    Attributes:
        high, low: ``[n]``, float64 (for complex numbers ``[2 n]``): the sum, and the compensation: the sum of the
            rounding errors.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, chunk_numel: int) -> None:
        numel *= 1 + dtype.is_complex
        self.high = torch.empty(numel, dtype=torch.float64, device=device)
        self.low = torch.zeros(numel, dtype=torch.float64, device=device)
        self._chunk_numel, self._is_empty = max(1, min(chunk_numel, numel)), True

    def follow(self, values: Tensor) -> None:
        """Replace the sum by ``values [n]`` in elements that are not the rounded sum: a user has written to them."""
        values, was_empty, self._is_empty = _real(values), self._is_empty, False
        if was_empty:
            self.high.copy_(values)
            return
        (total,), rounded = self.high.new_empty(1, self._chunk_numel), values.new_empty(self._chunk_numel)
        for chunk in [] if values.is_meta else self._chunks():
            (s,), (ours,), there = self._cut(chunk, total), self._cut(chunk, rounded), values[chunk]
            self._round(chunk, s, ours)
            if not (there.device.type == "cpu" and torch.equal(ours, there)):  # the host would wait for a GPU
                high, low, same = self.high[chunk], self.low[chunk], ours == there
                high.copy_(torch.where(same, high, there.to(high.dtype)))
                low.copy_(torch.where(same, low, torch.zeros_like(low)))

    def add_rows(self, rows: Tensor) -> None:
        """Add each of ``rows [k, n]``."""
        rows = _real(rows)
        term, total, part = self.high.new_empty(3, self._chunk_numel)
        first = int(self._is_empty)
        if self._is_empty:
            self.high.copy_(rows[0])
            self._is_empty = False
        for chunk in self._chunks():
            high, low, (b, s, x) = self.high[chunk], self.low[chunk], self._cut(chunk, term, total, part)
            for row in rows[first:, chunk]:
                b.copy_(row)
                torch.add(high, b, out=s)
                torch.sub(s, high, out=x)  # the part of the term that is in the sum
                b.sub_(x)
                torch.sub(s, x, out=x)
                torch.sub(high, x, out=x)
                low.add_(x.add_(b))
                high.copy_(s)

    def write(self, target: Tensor) -> None:
        """Write the sum, rounded, to ``target [n]``; NaN and Inf are those that plain addition gives."""
        target = _real(target)
        (total,) = self.high.new_empty(1, self._chunk_numel)
        for chunk in self._chunks():
            (s,) = self._cut(chunk, total)
            self._round(chunk, s, target[chunk])

    def _round(self, chunk: slice, scratch: Tensor, target: Tensor) -> None:
        torch.nan_to_num(self.low[chunk], nan=0.0, out=scratch)
        target.copy_(scratch.add_(self.high[chunk]))

    def _cut(self, chunk: slice, *scratch: Tensor) -> tuple[Tensor, ...]:
        """Return the first elements of each scratch tensor, as many as the chunk has."""
        return tuple(tensor[: chunk.stop - chunk.start] for tensor in scratch)

    def _chunks(self) -> list[slice]:
        """Return the chunks of the sum; on the meta device, where nothing is computed, only the first."""
        numel, step = self.high.numel(), self._chunk_numel
        stops = [numel] if not self.high.is_meta else [min(step, numel)]
        return [slice(start, min(start + step, stops[0])) for start in range(0, stops[0], step)]


def _real(tensor: Tensor) -> Tensor:
    """View complex numbers as twice as many real ones."""
    return torch.view_as_real(tensor).flatten(-2) if tensor.is_complex() else tensor


class ExactReducer(StatefulReducer):
    """Adds the gradients of every backward to one exact sum; the optimizer sees this sum rounded.

    Args:
        layout, strategy, rank_groups: as `GradientReducer`; there is one replica.
        dtype: dtype in which gradients are sent.
        device: device of the gradients.

    Attributes:
        exact: the sum of this rank's shard since gradients were cleared; None before the first addition.
        chunk_numel: see `ExactGradientSum`; a memory plan sets it to that of the device for which it plans.
    """

    accumulates = True
    needs_even_shards = True

    def __init__(
        self,
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layout, strategy, rank_groups)
        self._interval = slice(*layout.interval(self.comm.rank))
        self._dtype, self._device = dtype, device
        self.chunk_numel = CHUNK_NUMEL.get(device.type, OTHER_CHUNK_NUMEL)
        self.exact: ExactGradientSum | None = None

    def begin(self, local: Tensor) -> ExactReduction:
        """Return a reduction of ``local [padded_numel]`` that adds to the sum."""
        assert self.exact is not None
        return ExactReduction(self.comm, self._interval, self.exact, local, everywhere=self.everywhere)

    def follow(self, reduced: Tensor | None) -> None:
        """Let elements that a user has written into ``reduced``, the gradients so far, replace the sum's."""
        if self.exact is None:
            numel = self._interval.stop - self._interval.start
            self.exact = ExactGradientSum(numel, self._dtype, self._device, self.chunk_numel)
        if reduced is not None:
            self.exact.follow(reduced[self._interval] if self.everywhere else reduced)

    def clear(self) -> None:
        """Drop the sum."""
        self.exact = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are resident now."""
        return [] if self.exact is None else [self.exact.high, self.exact.low]


class ExactReduction(GradientReduction):
    """A reduce-scatter of one micro-batch's gradients into an exact sum; an all-reduce if all ranks need the sum.

    Args:
        comm: the ranks that hold the shards.
        own: this rank's shard in the buffer.
        exact: the sum to which the gradients are added.
        local: ``[padded_numel]``: this rank's gradients; read until `deliver`.
        everywhere: whether the rounded sums of all shards are gathered on every rank.

    Attributes:
        packed: ``[padded_numel]``: the gradients that arrive; None on a single rank.
    """

    def __init__(
        self, comm: Communicator, own: slice, exact: ExactGradientSum, local: Tensor, *, everywhere: bool
    ) -> None:
        self._comm, self._own, self._exact, self._local = comm, own, exact, local
        alone = self._comm.world_size == 1
        self.packed = None if alone else empty_for(self._comm, local.numel(), local.dtype, local.device)
        self._gathers = everywhere and not alone
        self.num_left = 2 if self._gathers else 1
        self._added = False

    def issue(self, target: Tensor) -> Work:
        """Issue the next collective; the one before it must be done. ``target``: as `deliver` is given."""
        self.num_left -= 1
        if self.packed is None:
            return DONE
        if not self._gathers or self.num_left:
            return all_to_all(self._comm, self.packed, self._local)
        self._add(target[self._own])
        return self._comm.all_gather(target, target[self._own])

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target``: this rank's shard ``[shard_numel]``, or all shards ``[padded_numel]``."""
        if not self._added:
            self._add(target)

    def _add(self, own: Tensor) -> None:
        self._added = True
        rows = self._local if self.packed is None else self.packed
        self._exact.add_rows(rows.view(self._comm.world_size, -1))
        self._exact.write(own)
