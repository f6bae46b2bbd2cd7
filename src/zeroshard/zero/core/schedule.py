"""The order in which ranks issue their collectives: lists made before the first of them, the same on every rank.

Ranks may run different code for a step, yet must issue the same collectives in the same order. So each walks the same
list; an event of its own execution (a unit's forward begins, its backward begins or ends) only says *how far*. The
collectives of a unit that a rank skips are issued when it gets there.

Forward, weights sharded, one unit ahead (``prefetch=1``) over four units::

    gather 0, gather 1 | gather 2 | gather 3 |          | = unit 0, 1, 2, 3 begins

Backward::

    gather 3, gather 2 | reduce 3, gather 1 | reduce 2, gather 0 | reduce 1 | reduce 0, reduce root

The gather of unit 3 sends nothing: forward has left its weights unsharded. See also `Unit.read_in_backward`.

If a backward goes through two forwards, the second comes first::

    gather 3, gather 2 | free 3, gather 1 | ... | free 0 || gather 3, gather 2 | reduce 3, ... reduce 0, reduce root
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch

from zeroshard.comm import Communicator
from zeroshard.comm.agree import of_first_rank
from zeroshard.host.torch_internals import at_end_of_backward
from zeroshard.zero.core.forward import Forward
from zeroshard.zero.core.units import Unit

ROOT = -1


def agreed_order(comm: Communicator, units: list[Any], ran: list[Any]) -> list[Any]:
    """Return ``units`` in the order in which rank 0 ran them; ``ran``: this rank's order. Collective."""
    recorded = list(ran)
    for place, unit in enumerate(units):
        if unit not in recorded:  # another rank may run it: put it after the unit registered before it
            recorded.insert(recorded.index(units[place - 1]) + 1 if place else 0, unit)
    if comm.world_size == 1:
        return recorded
    return [units[place] for place in of_first_rank(comm, [units.index(unit) for unit in recorded])]


class Op(NamedTuple):
    """One step of a schedule: gather, free or reduce the unit at a place of the order.

    ``sweep``: the number of forwards of the model that backward still has to go through after this one; usually 0.
    """

    action: Literal["gather", "free", "reduce"]
    place: int
    sweep: int = 0


def backward_ops(num_units: int, *, prefetch: int, gather: bool) -> list[Op]:
    """From the last unit to the first: gather (if ``gather``) ``prefetch`` places ahead of use, reduce after it."""
    ops, next_gather = [], num_units - 1
    for place in reversed(range(num_units)):
        while gather and next_gather >= max(place - prefetch, 0):
            ops.append(Op("gather", next_gather))
            next_gather -= 1
        ops.append(Op("reduce", place))
    return [*ops, Op("reduce", ROOT)]


class Cursor:
    """A position in a schedule that only moves forward; ``take`` executes an operation."""

    def __init__(self, ops: Sequence[Op], take: Callable[[Op], None]) -> None:
        self._ops, self._take = ops, take
        self._index = {op: i for i, op in enumerate(ops)}
        self._next = 0

    def through(self, op: Op) -> None:
        """Run all operations up to and including ``op``; none if it was passed already or is not in the schedule."""
        self._walk(self._index.get(op, -1) + 1)

    def before(self, op: Op) -> None:
        """Run all operations up to ``op``, excluding it."""
        self._walk(self._index.get(op, 0))

    def _walk(self, stop: int) -> None:
        while self._next < stop:
            op = self._ops[self._next]
            self._next += 1  # before running: an op may call this cursor again
            self._take(op)


class BackwardPass(Cursor):
    """One backward pass: its forwards, and how far this rank has walked the schedule through all of them.

    Args:
        ops: the schedule of a backward through one forward.
        forwards: those that it goes through, the latest first, the same on every rank; at least one.
        order: the units but the root, in the order of the schedule.
        take: executes one operation of the schedule (gather, free or reduce).

    Attributes:
        forward: the forward whose calls it goes through now.
        called_again: units that one forward called several times.
        ends_badly: whether an exception came after its last gradient.
    """

    def __init__(
        self, ops: Sequence[Op], forwards: Sequence[Forward], order: Sequence[Unit[Any]], take: Callable[[Op], None]
    ) -> None:
        # Each sweep but the last gathers and frees every unit: gradients are complete in the last one only.
        sweeps = [op._replace(sweep=sweep) for sweep in reversed(range(1, len(forwards))) for op in ops[:-1]]
        super().__init__([*(op._replace(action="free") if op.action == "reduce" else op for op in sweeps), *ops], take)
        self.forwards, self.forward = forwards, forwards[0]
        self._sweep = {forward: sweep for sweep, forward in enumerate(reversed(forwards))}
        self.called_again = dict.fromkeys(u for u in order if u.read_in_backward and self.calls_left(u) > 1)

        def run() -> None:
            """Nothing: this call of autograd alone refers to it, so it is freed when the call ends or raises."""

        at_end_of_backward(run)
        self._run = weakref.ref(run)
        self.ends_badly = False
        # If so, a backward through this backward may follow; it reads weights before any hook is called.
        self.creates_graph = torch.is_grad_enabled()

    def end(self, place: int, forward: Forward) -> Op:
        """The operation that frees the unit at that place after its calls in that forward, or reduces its gradients."""
        sweep = self._sweep.get(forward, 0)  # 0: a forward no longer expected; a graph may be run twice
        return Op("reduce" if sweep == 0 else "free", place, sweep)

    def calls_left(self, unit: Unit[Any]) -> int:
        """The largest number of calls of the unit, in one of the forwards, whose backward is still to come."""
        if len(self.forwards) == 1:  # nearly always
            return self.forwards[0].calls.get(unit, 0)
        return max([forward.calls.get(unit, 0) for forward in self.forwards])

    def is_first(self, sweep: int) -> bool:
        """Whether no earlier sweep of this pass has freed weights that forward left unsharded."""
        return sweep == len(self.forwards) - 1

    @property
    def failed(self) -> bool:
        """Whether an exception ended this pass."""
        return self.ends_badly or self._run() is None
