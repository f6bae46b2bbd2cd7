"""What ranks may do differently: gathers, steps, writes, calls. `Calls` is notified of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.core.ranks import RankGroups


class Calls:
    """Is notified of what could make ranks differ, and compares none of it.

    `zeroshard.zero.guards.collective_order` does.

    Attributes:
        calls: what was noted since ranks agreed, and may be different on other ranks.
        gathers: units, in the order in which this rank has issued gathers of their weights; None: nobody asks.
    """

    gathers: list[FlatUnit] | None = None

    def __init__(self, rank_groups: RankGroups) -> None:
        self.comm, self._gathering = rank_groups.world, rank_groups.shard_group
        self.calls: list[str] = []

    def votes(self) -> list[int]:
        """What all ranks must have in common."""
        return []

    def agreed(self, votes: list[int]) -> None:
        """Raise if they have not."""

    def note_grad_writes(self, groups: Iterable[FlatGroup]) -> None:
        """This rank is about to step with gradients of the groups into which it has written."""

    def note_step(self) -> None:
        """This rank has stepped an optimizer."""

    def note_call(self, what: str) -> None:
        """This rank has made a call that every rank must make with the same arguments."""

    def note_writes(self, groups: Iterable[FlatGroup]) -> None:
        """This rank has written to the unsharded weights of these groups, and steps before they are compared."""

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """The user has assigned these tensors, of any shape, to ``param.grad``: ``(name, tensor)``. Collective."""

    def require_same_weights(self, groups: Iterable[FlatGroup]) -> None:
        """Some rank has written in place to the weights of these groups. Collective."""
