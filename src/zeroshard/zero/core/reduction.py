"""How the local sums of one flat buffer become the mean over ranks: a reduction, and the collectives of it in turn."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from zeroshard.comm import Work
from zeroshard.settings.wire_formats import Rounding
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy


class GradientReduction(Protocol):
    """A reduction of one buffer that has begun."""

    num_left: int  # collectives that are still to be issued

    @property
    def packed(self) -> Tensor | None:
        """The buffer of gradients that arrive elsewhere than in their target, until they have been added up."""
        ...

    def issue(self, target: Tensor) -> Work:
        """Issue the next collective, once the one before it is done."""
        ...

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target``, once all collectives are done, unless they have written it."""
        ...


class RunningSum(Protocol):
    """What a reducer keeps between reductions, if a reduction's result contains the gradients reduced before."""

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are resident between reductions."""
        ...

    def follow(self, reduced: Tensor | None) -> None:
        """Before the next reduction adds to ``reduced``: take over what a user has written there."""
        ...

    def clear(self) -> None:
        """Drop what was accumulated."""
        ...


class GradientReducer(Protocol):
    """Begins the reductions of one buffer.

    A new member is a class, and a line in `zeroshard.zero.transport.members`:

    | reducer         | a reduction                                                          | collectives |
    |-----------------|----------------------------------------------------------------------|-------------|
    | `PlainReducer`  | `PlainReduction`: all-reduce (stage 0) or reduce-scatter; with       | 1 or 2      |
    |                 | replicas then the sum of the shard over them                         |             |
    | `PackedReducer` | the same in a wire format: `PackedReduce`, over nodes `NodeReduce`,  | 1, 2 or 3   |
    |                 | over replicas `AcrossReplicas`                                       |             |
    | `ExactReducer`  | exact sums, for the same bits on any number of ranks:                | 1 or 2      |
    |                 | `ExactReduction`                                                     |             |
    """

    needs_even_shards: bool  # whether shards must have one length

    @property
    def running_sum(self) -> RunningSum | None:
        """None: each reduction is of the gradients since the last one."""
        ...

    @property
    def rounding(self) -> Rounding | None:
        """Numbers the steps of a stochastic rounding; None: reductions are the same in each step."""
        ...

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``, whose values are undefined after it. Collective."""
        ...


class PlainReducer:
    """Sends gradients in the dtype in which they accumulate, and keeps nothing."""

    running_sum = rounding = None

    def __init__(self, layout: FlatLayout, strategy: ShardingStrategy, rank_groups: RankGroups) -> None:
        self.layout, self.everywhere = layout, strategy.optim is not SHARD  # whether every rank needs the whole sum
        self.comm, self.replicate_group = rank_groups.shard_group, rank_groups.replicate_group
        self.needs_even_shards = self.replicate_group.world_size > 1

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``, whose values are undefined after it. Collective."""
        return PlainReduction(self, local)


class PlainReduction:
    """A reduce-scatter, or an all-reduce if every rank needs the sum; with replicas, then an all-reduce over these."""

    packed = None

    def __init__(self, reducer: PlainReducer, local: Tensor) -> None:
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
