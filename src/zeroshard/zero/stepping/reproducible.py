"""The rule of steps that have the same bits on any number of ranks: each adds up every micro-batch."""

from __future__ import annotations

from torch import nn

from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.stepping.observer import Observer


class ReproducibleSteps(Observer):
    """Refuses steps with gradients of a number of micro-batches that is no multiple of ``Zero(reproducible=)``."""

    def __init__(self, runtime: Runtime, rank_groups: RankGroups) -> None:
        self._runtime, self._rank_groups = runtime, rank_groups

    def before_step(self, members: set[nn.Parameter]) -> None:
        """Raise RuntimeError if micro-batches are missing; with a closure all parameters are checked."""
        world_size, parts = self._rank_groups.world.world_size, self._rank_groups.parts
        for group in self._runtime.groups():
            found, theirs = group.grads.num_backwards, not members or not members.isdisjoint(group.params.params)
            if theirs and any(group.grads.used) and found % parts:
                what = f"{found} backwards on each of {world_size} ranks since gradients were cleared"
                todo = f"have {parts}, or a multiple of it, of one micro-batch each"
                number = self._rank_groups.reproducible
                raise RuntimeError(f"step: {what} are no multiple of reproducible={number}; {todo}")
