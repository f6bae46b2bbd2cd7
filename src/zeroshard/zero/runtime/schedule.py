"""In which order a rank issues its collectives: lists made before the first of them, the same on every rank.

Ranks may run different code for a step (a branch that one of them does not take), yet must issue the same
collectives in the same order. So no rank issues what it happens to need. Each walks the same list; an event of its
own execution (a unit's forward begins, its backward begins or ends) only says *how far* it may walk. What a rank
skipped over is issued all the same when it gets past it.

Forward, weights sharded, one unit ahead (``prefetch=1``) over four units::

    gather 0, gather 1 | gather 2 | gather 3 |          | = unit 0, 1, 2, 3 begins

Backward::

    gather 3, gather 2 | reduce 3, gather 1 | reduce 2, gather 0 | reduce 1 | reduce 0, reduce root

The gather of unit 3 finds its weights where forward left them, at every rank, and sends nothing. A unit whose backward
reads no weights, an embedding, is not gathered for it (`Unit.read_in_backward`).

Where two forwards share a backward, it goes through the second and then through the first::

    gather 3, gather 2 | free 3, gather 1 | ... | free 0 || gather 3, gather 2 | reduce 3, ... reduce 0, reduce root
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

ROOT = -1


class Op(NamedTuple):
    """One step of a schedule: gather, free or reduce the unit at a place of the order.

    Attributes:
        sweep: how many forwards of the model are still to be gone through backward after this one.
    """

    action: Literal["gather", "free", "reduce"]
    place: int
    sweep: int = 0


def forward_ops(num_units: int) -> list[Op]:
    """Gather every unit, first to last."""
    return [Op("gather", place) for place in range(num_units)]


def backward_ops(num_units: int, *, prefetch: int, gather: bool, num_sweeps: int = 1) -> list[Op]:
    """Last to first: gather a unit ``prefetch`` places ahead of its use, reduce it when its turn is over.

    ``num_sweeps``: forwards that this backward goes through, the latest first. Each but the last sweep gathers and
    frees every unit; only the last one has all gradients, and reduces.
    """
    ops: list[Op] = []
    for sweep in reversed(range(num_sweeps)):
        ends = [Op("reduce" if sweep == 0 else "free", place, sweep) for place in range(num_units)]
        next_gather = num_units - 1
        for place in reversed(range(num_units)):
            ops += ends[place + 1 : place + 2]
            while gather and next_gather >= max(place - prefetch, 0):
                ops.append(Op("gather", next_gather, sweep))
                next_gather -= 1
        ops += ends[:1]
    return [*ops, Op("reduce", ROOT)]


class Cursor:
    """A position in a schedule that only moves forward."""

    def __init__(self, ops: Sequence[Op], run: Callable[[Op], None]) -> None:
        self._ops = ops
        self._run = run
        self._index = {op: i for i, op in enumerate(ops)}
        self._next = 0

    def through(self, op: Op) -> None:
        """Run everything up to and with ``op``; nothing if it is passed, or no part of the schedule."""
        self._walk(self._index.get(op, -1) + 1)

    def before(self, op: Op) -> None:
        """Run everything up to ``op``, without it."""
        self._walk(self._index.get(op, 0))

    def finish(self) -> None:
        """Run what is left."""
        self._walk(len(self._ops))

    def _walk(self, stop: int) -> None:
        while self._next < stop:
            op = self._ops[self._next]
            self._next += 1  # before running: an op may come back here
            self._run(op)
