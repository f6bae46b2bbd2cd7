"""One backward pass of autograd through the graphs of several forwards, or one that an exception ends.

If a backward goes through two forwards, the second comes first::

    gather 3, gather 2 | free 3, gather 1 | ... | free 0 || gather 3, gather 2 | reduce 3, ... reduce 0, reduce root
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from zeroshard.host.torch_internals import at_end_of_backward
from zeroshard.zero.core.forward import Forward
from zeroshard.zero.core.schedule import Cursor, Op
from zeroshard.zero.core.units import Unit


class _Run:
    """One call of autograd; only its final callback is this object, so it is freed when the call ends or raises."""

    def __call__(self) -> None:
        """Do nothing."""


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
        run = _Run()
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
