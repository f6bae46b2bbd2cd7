"""One backward pass of autograd, as the engine follows it through the schedule of collectives."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from zeroshard.zero.buffers.unit import Unit
from zeroshard.zero.core.schedule import Cursor, Op, backward_ops


class Run:
    """One call of autograd; only its final callback refers to this, so it is freed when the call ends or raises."""


class BackwardPass:
    """One backward pass: its units, their places in the schedule, and how far this rank has walked the schedule.

    Args:
        units: in the agreed order.
        forward_runs: the forwards that it goes through, the latest first, the same on every rank; at least one.
        prefetch, gather: as `backward_ops` takes them.
        take: executes one operation of the schedule (gather, free or reduce).
        run: the call of autograd that this pass belongs to.

    Attributes:
        forward_run: the number of the forward whose calls it goes through now.
    """

    def __init__(
        self,
        units: list[Unit],
        forward_runs: Sequence[int],
        take: Callable[[Op], None],
        run: Run,
        *,
        prefetch: int,
        gather: bool,
    ) -> None:
        self.units = units
        self.forward_runs = list(forward_runs)
        self.forward_run = self.forward_runs[0]
        self._place = {unit: place for place, unit in enumerate(units)}
        self._sweep = {index: sweep for sweep, index in enumerate(reversed(self.forward_runs))}
        ops = backward_ops(len(units), prefetch=prefetch, gather=gather, num_sweeps=len(self.forward_runs))
        self.cursor = Cursor([op for op in ops if op.action != "gather" or units[op.place].read_in_backward], take)
        self._run = weakref.ref(run)
        self._failed = False
        # If so, a backward through this backward may follow; it reads weights before any hook is called.
        self.creates_graph = torch.is_grad_enabled()

    def before_end(self, unit: Unit, forward_run: int) -> None:
        """Walk the schedule until the unit's weights are unsharded for backward through its calls of that forward."""
        if unit in self._place:
            self.cursor.before(self._end(unit, forward_run))

    def through_end(self, unit: Unit, forward_run: int) -> None:
        """Walk the schedule past the unit's calls of that forward: its weights are freed, or its gradients reduced."""
        if unit in self._place:
            self.cursor.through(self._end(unit, forward_run))

    def _end(self, unit: Unit, forward_run: int) -> Op:
        sweep = self._sweep.get(forward_run, 0)  # 0: a forward no longer expected; a graph may be run twice
        return Op("reduce" if sweep == 0 else "free", self._place[unit], sweep)

    def run_of(self, op: Op) -> int:
        """The number of the forward that the operation belongs to."""
        return self.forward_runs[-1 - op.sweep]

    def is_first(self, sweep: int) -> bool:
        """Whether no earlier sweep of this pass has freed weights that forward left unsharded."""
        return sweep == len(self.forward_runs) - 1

    @property
    def failed(self) -> bool:
        """Whether an exception ended this pass."""
        return self._failed or self._run() is None

    def fail(self) -> None:
        """Record that an exception ended this pass after its last gradient."""
        self._failed = True
