"""How ranks agree: on the order of units, on the forwards that a backward goes through, and on flags."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from zeroshard.comm.agree import maxima, of_first_rank
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.core.ranks import RankGroups


class Agreement:
    """Agrees with other ranks, and is notified of what could make them differ.

    `zeroshard.zero.guards.collective_order` compares it.

    Args:
        rank_groups: the communicators of all ranks (`world`) and of the ranks that gather together (`shard_group`).

    Attributes:
        calls: what was noted since ranks agreed, and may be different on other ranks.
    """

    def __init__(self, rank_groups: RankGroups) -> None:
        self.comm, self._gathering = rank_groups.world, rank_groups.shard_group
        self.calls: list[str] = []

    def note_gather(self, unit: Unit) -> None:
        """This rank has issued a gather of the unit's weights."""

    def note_grad_writes(self, groups: Iterable[FlatGroup]) -> None:
        """This rank is about to step with gradients of the groups into which it has written."""

    def note_step(self) -> None:
        """This rank has stepped an optimizer."""

    def note_call(self, what: str) -> None:
        """This rank has made a call that every rank must make with the same arguments."""

    def note_writes(self, groups: Iterable[FlatGroup]) -> None:
        """This rank has written to the unsharded weights of these groups, and steps before they are compared."""

    def agree_on_units(self, units: list[Unit], ran: list[Unit]) -> list[Unit]:
        """Return ``units`` in the order in which rank 0 ran them; ``ran``: this rank's order. Collective."""
        recorded = list(ran)
        for place, unit in enumerate(units):
            if unit not in recorded:  # another rank may run it: put it after the unit registered before it
                recorded.insert(recorded.index(units[place - 1]) + 1 if place else 0, unit)
        if self.comm.world_size == 1:
            return recorded
        return [units[place] for place in of_first_rank(self.comm, [units.index(unit) for unit in recorded])]

    def agree_on_forwards(self, votes: list[int]) -> list[int]:
        """Return the maximum of each vote over ranks. Collective; every rank gives equally many votes."""
        return maxima(self._gathering, votes, torch.int64)

    def agree_on_flags(self, flags: list[bool]) -> list[bool]:
        """Return for each flag whether any rank has set it. Collective."""
        return flags if self.comm.world_size == 1 else [bool(flag) for flag in maxima(self.comm, flags)]

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """The user has assigned these tensors, of any shape, to ``param.grad``: ``(name, tensor)``. Collective."""

    def require_same_weights(self, groups: Iterable[FlatGroup]) -> None:
        """Some rank has written in place to the weights of these groups. Collective."""
