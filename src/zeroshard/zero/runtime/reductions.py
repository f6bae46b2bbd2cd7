"""The gradient reductions of one backward: issued unit by unit, a few of them in flight, and completed at its end.

[Note: Ahead of a gather]
    A reduction in flight keeps its unit's local gradients in memory. Where weights are gathered one unit ahead,
    collectives are issued in this order (`schedule`)::

        reduce 3, gather 1 | backward of 2 | reduce 2, gather 0 | backward of 1 | ...

    Backward of 1 waits for ``gather 1``, and collectives among the same ranks run in the order in which they were
    issued, so ``reduce 3`` is done by then too. To wait for it just before ``gather 0`` is issued costs no time:
    ``gather 1`` and ``reduce 2`` are still queued. It frees a buffer before that gather allocates one, and one
    reduction is in flight while a unit's gradients are computed. Where nothing is gathered in between there are up to
    `MAX_REDUCTIONS_IN_FLIGHT`.
"""

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

    def free_ahead_of_gather(self) -> None:
        """Wait for all reductions but the newest, because a gather is about to be issued: [Note: Ahead of a gather]."""
        # If the newest has collectives left, the one before has only just issued its last.
        if self._in_flight and not self._in_flight[-1].has_collectives_left:
            while len(self._in_flight) > 1:
                self._in_flight.popleft().wait_for_reduce()

    def _across(self) -> None:
        """Issue the next collective, over replicas or nodes, of each unit that has one left."""
        for unit in self._to_replicas:
            unit.reduce_across()
        self._to_replicas = deque(unit for unit in self._to_replicas if unit.has_collectives_left)

    def finish(self, all_units: Sequence[Unit]) -> None:
        """Agree on which parameters had gradients on any rank, reduce late gradients, and wait for all. Collective.

        See [Note: Unused parameters] in `gradients`.

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
