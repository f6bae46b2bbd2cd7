"""Sums of gradients that have the same bits on any number of ranks.

A floating-point sum depends on the order of its terms, and the order changes with the number of ranks: one rank adds up
the gradients of its micro-batches, several ranks reduce theirs. With steps of the same bits no sum is rounded until all
terms are added up. So the result depends neither on the order nor on which rank computed which micro-batch::

    local       [W * n]   this rank's gradient of one micro-batch, in ``reduce_dtype``
    all-to-all  [W, n]    every rank's gradient of this rank's shard
    total       [n] x 2   sum and compensation (the rounding errors of all additions), in float64

The total is rounded once: `zeroshard.zero.transport.exact_sum`. Shards are laid out, cut into pieces and added up for
the norm as on the most ranks (`FlatLayout.parts`), whatever the number of ranks is.

Ranks exchange each micro-batch, as at stage 2. If they first added up their own, they would have to send two float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zeroshard.comm import Communicator, Work, all_to_all, empty_for
from zeroshard.comm.base import DONE
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.transport.exact_sum import CHUNK_NUMEL, OTHER_CHUNK_NUMEL, ExactGradientSum


class ExactReducer:
    """Adds the gradients of every backward to one exact sum; the optimizer sees this sum rounded.

    Args:
        layout, strategy, rank_groups: as `GradientReducer`; there is one replica.
        dtype: dtype in which gradients are sent.
        device: device of the gradients.

    Attributes:
        exact: the sum of this rank's shard since gradients were cleared; None before the first addition.
        chunk_numel: see `ExactGradientSum`; a memory plan sets it to that of the device for which it plans.
    """

    needs_even_shards = True
    rounding = None

    def __init__(
        self,
        layout: FlatLayout,
        strategy: ShardingStrategy,
        rank_groups: RankGroups,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.comm, self.everywhere = rank_groups.shard_group, strategy.optim is not SHARD
        self.running_sum = self
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


class ExactReduction:
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
