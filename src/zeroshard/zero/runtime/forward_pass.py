"""The weights of a forward: unsharded ahead of their use, in the same order on every rank, and resharded after it.

[Note: The turn]
    Backward begins with the unit that forward ended with. So every rank keeps the weights of the last unit of the order
    unsharded between the two, whether the unit ran on that rank or not. This saves one all-gather: the one that no
    computation could overlap.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.core.schedule import Cursor, Op, forward_ops
from zeroshard.zero.runtime.unsharded_weights import UnshardedWeights


class ForwardPass:
    """The forward that is running, or the last one: gathers and frees the weights of the units that it reaches.

    Args:
        root, units: the root unit, and the others in order of registration.
        weights: the weights of all units.
        prefetch: how many units ahead sharded weights are gathered.

    Attributes:
        order: the units but the root, in the order in which their weights are gathered.
        ran: units in order of their first call in this forward.
        by_parts: units that were not called themselves, only their submodules, so that no hook frees their weights.
        read_while_stale: units whose current weights arrived after a forward that may have read the stale ones.
        unsharded_until_backward: the unit whose weights stay unsharded until its backward, or None: [Note: The turn].
    """

    def __init__(self, root: Unit, units: Sequence[Unit], weights: UnshardedWeights, prefetch: int) -> None:
        self._root, self._weights, self._prefetch = root, weights, prefetch
        self.take_order(list(units))
        self.ran: dict[Unit, None] = {}
        self.by_parts: dict[Unit, None] = {}
        self.read_while_stale: set[Unit] = set()
        self.unsharded_until_backward: Unit | None = None
        self._frees_after_use = True
        self._cursor = Cursor([], lambda op: None)

    def take_order(self, units: list[Unit]) -> None:
        """Gather the units in this order from now on."""
        self.order = units
        self._place = {unit: place for place, unit in enumerate(units)}

    def begin(self, *, reshard_after_forward: bool) -> None:
        """Begin a forward: issue the gathers of the root and the first units, or of all units if none is sharded."""
        self.ran, self.by_parts, self.read_while_stale = {}, {}, set()
        # One answer for all units, called or skipped: every rank must keep the same units unsharded.
        self._frees_after_use = reshard_after_forward or not torch.is_grad_enabled()
        self.unsharded_until_backward = self.order[-1] if self.order and torch.is_grad_enabled() else None
        self._weights.unshard(self._root)
        if self._weights.shard_params:
            self._weights.show_as_current()
            self._cursor = Cursor(forward_ops(len(self.order)), lambda op: self._weights.unshard(self.order[op.place]))
            self._cursor.through(Op("gather", min(self._prefetch, len(self.order)) - 1))
        else:
            for unit in self.order:
                self._weights.unshard(unit)

    def reach(self, unit: Unit) -> None:
        """Issue the gathers up to this unit and ``prefetch`` units further."""
        self.ran.setdefault(unit)
        self.read_while_stale.discard(unit)
        self._cursor.through(Op("gather", min(self._place[unit] + self._prefetch, len(self.order) - 1)))

    def gather_the_rest(self) -> None:
        """Issue the remaining gathers when forward ends: other ranks may have called units that this one has not."""
        self._cursor.finish()

    def free_what_nobody_frees(self) -> None:
        """Free the units that no hook frees: skipped ones, and those of which only submodules were called."""
        for unit in self.order:
            if unit not in self.ran:
                self._skipped(unit)
                self.free(unit)
        for unit in self.by_parts:
            self.free(unit)
        self._weights.watch_freed()

    def free(self, unit: Unit) -> None:
        """Free the unit's weights, unless backward needs them at once."""
        if self._frees_after_use and unit is not self.unsharded_until_backward:
            self._weights.reshard_unless_needed(unit)

    def _skipped(self, unit: Unit) -> None:
        """Wait for the gather of a unit that was not called; its weights may be gathered again only after that."""
        if unit.gather_in_flight and not self._weights.shard_params and torch.is_grad_enabled():
            # A read without a module's call has seen stale values: the new version lets autograd detect that.
            torch.autograd.graph.increment_version([p for group in unit.groups for p in group.params.params])
            self.read_while_stale.add(unit)
        unit.wait_for_unshard()
