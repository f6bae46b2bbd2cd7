"""The gradient reductions of one backward: issued unit by unit, a few of them in flight, and completed at its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.runtime.collective_order import CollectiveOrder
from zeroshard.zero.runtime.module_buffers import ModuleBuffers

MAX_REDUCTIONS_IN_FLIGHT = 2


class Reductions:
    """The gradient reductions that are in flight.

    Args:
        collectives: through which ranks agree on flags at the end of each backward.
        buffers: the model's buffers, which are synchronised at the end of each backward.
    """

    def __init__(self, collectives: CollectiveOrder, buffers: ModuleBuffers) -> None:
        self._collectives, self._buffers = collectives, buffers
        self._in_flight: deque[Unit] = deque()
        self._to_replicas: deque[Unit] = deque()  # units with further collectives to issue, over replicas or nodes

    def start(self, unit: Unit, *, shard_grads: bool) -> None:
        """Start to reduce the unit's gradients; if ``shard_grads``, wait for older reductions to free their buffers."""
        unit.reduce()
        self._across()  # for earlier units: their first reduction has had time to finish
        self._to_replicas.append(unit)
        if shard_grads:
            self._in_flight.append(unit)
            while len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                self._in_flight.popleft().wait_for_reduce()

    def _across(self) -> None:
        """Issue the next collective, over replicas or nodes, of each unit that has one left."""
        for unit in self._to_replicas:
            unit.reduce_across()
        self._to_replicas = deque(unit for unit in self._to_replicas if unit.has_collectives_left)

    def finish(self, all_units: Sequence[Unit]) -> None:
        """Agree on which parameters had gradients on any rank, reduce late gradients, and wait for all. Collective.

        See [Note: Unused parameters] in `flat_grads`.

        Raises:
            RuntimeError: ranks have issued different gathers; see `CollectiveOrder.agree_on_flags`.
        """
        while self._to_replicas:
            self._across()
        units = [unit for unit in all_units if unit.trained_groups()]
        groups = [group for unit in units for group in unit.trained_groups()]
        late = [any(group.grads.pending for group in unit.groups) for unit in units]
        flags = [*(flag for group in groups for flag in group.grads.used), *late, *self._buffers.changed()]
        flags = self._collectives.agree_on_flags(flags) if flags else flags
        start = 0
        for group in groups:
            stop = start + len(group.grads.used)
            group.grads.used = flags[start:stop]
            start = stop
        for unit, is_late in zip(units, flags[start : start + len(late)], strict=True):
            if is_late:
                unit.reduce()
        while any(unit.has_collectives_left for unit in units):
            for unit in units:
                unit.reduce_across()
        for unit in units:
            unit.wait_for_reduce()
        for group in groups:
            group.grads.num_backwards += 1
        self._in_flight.clear()
        self._buffers.sync(flags[start + len(late) :])
