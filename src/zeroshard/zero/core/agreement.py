"""How ranks agree: on the order of units, on the forwards that a backward goes through, and on flags."""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm.agree import maxima, of_first_rank
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.units import AnyGroup, Unit


class Agreement:
    """Agrees with other ranks, and is notified of gathers: `zeroshard.zero.guards.collective_order` compares these.

    Args:
        rank_groups: the communicators of all ranks (`world`) and of the ranks that gather together (`shard_group`).
    """

    def __init__(self, rank_groups: RankGroups) -> None:
        self.comm, self._gathering = rank_groups.world, rank_groups.shard_group

    def note_gather(self, unit: Unit[Any]) -> None:
        """This rank has issued a gather of the unit's weights."""

    def agree_on_units(self, units: list[Unit[AnyGroup]], ran: list[Unit[AnyGroup]]) -> list[Unit[AnyGroup]]:
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
