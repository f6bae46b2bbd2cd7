"""Tracks a run's lowest validation loss, for ``keep_best`` (keep its checkpoint) and ``early_stop``."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any


class BestLoss:
    """The lowest validation loss so far and when it occurred; the same on every rank, and saved with each checkpoint.

    ``patience``: evaluations in a row without a lower loss after which the run stops; 0: it never does.
    """

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self.step: int | None = None  # None before the first evaluation
        self.loss, self.num_worse = inf, 0  # num_worse: evaluations since the lowest loss

    def record(self, step: int, loss: float) -> bool:
        """Record the loss after ``step`` steps; return whether it is the lowest so far. NaN never is."""
        if loss < self.loss:
            self.step, self.loss, self.num_worse = step, loss, 0
            return True
        self.num_worse += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether ``patience`` evaluations in a row were no better, so that the run should stop."""
        return 0 < self._patience <= self.num_worse

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values, for a checkpoint."""
        loss = None if self.step is None else self.loss
        return {"step": self.step, "loss": loss, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step, self.num_worse = state["step"], state["num_worse"]
        self.loss = inf if self.step is None else state["loss"]
