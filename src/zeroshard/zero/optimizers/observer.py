"""`Observer`: what is attached to an engine and takes part in its steps, saves and loads.

The engine has one list of observers. It tells each of them of the events below, in the order in which they were
attached, and asks them for what they keep. These are the members: averages of weights
(`zeroshard.zero.ema.observer`), replicas that take local steps (`zeroshard.zero.local_steps.observer`), and
the rule of steps that have the same bits on any number of ranks, below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.optim.named_shards import NamedShard, ShardReader
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.optimizers.state_dict import Stateful
from zeroshard.zero.runtime.runtime import Runtime


class Observer:
    """Takes no part in anything; a member overrides what it needs."""

    category = ""  # of `tensors`, in accounts of memory
    parts_weights = False  # whether groups of ranks have weights of their own

    # -- events -------------------------------------------------------------------------------------------------

    def optimizer_comes(self, piecewise: PiecewiseOptimizer) -> None:
        """An optimizer is being made or adopted; ValueError refuses it."""

    def layout_changes(self) -> None:
        """Some parameters are about to move to other buffers; RuntimeError refuses it."""

    def before_step(self, members: set[nn.Parameter]) -> None:
        """The optimizer of ``members`` is about to step (empty: one with a closure); RuntimeError refuses it."""

    def after_step(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """The optimizer of ``members`` has stepped."""

    def weights_replaced(self) -> None:
        """All weights were replaced, by the same values on every rank."""

    def resumes_at(self, step: int) -> None:
        """A run resumes after ``step`` steps."""

    # -- questions ----------------------------------------------------------------------------------------------

    def require_weights(self, what: str) -> None:
        """Raise RuntimeError about ``what`` while something else is in the place of the weights."""

    def require_common(self, what: str) -> None:
        """Raise RuntimeError about ``what`` if not all ranks have the same weights."""

    def holders(self) -> Sequence[Stateful]:
        """The objects with state by shard, laid out like an optimizer's."""
        return ()

    def shards(self, written: Iterator[NamedShard]) -> Iterator[NamedShard]:
        """What this rank writes to a checkpoint in place of ``written``."""
        return written

    def reader(self, reader: ShardReader) -> ShardReader:
        """From what weights and optimizer states are loaded, in place of ``reader``."""
        return reader

    def load(self, reader: ShardReader) -> None:
        """Load what `shards` has written, after weights and optimizer states."""

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """``(unit's name, tensor)`` of all resident tensors."""
        return ()


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
