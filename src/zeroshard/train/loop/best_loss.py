"""Tracks a run's lowest validation loss, for ``keep_best`` (keep its checkpoint)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any


class BestLoss:
    """The lowest validation loss so far and its step; the same on every rank, and saved with each checkpoint."""

    def __init__(self) -> None:
        self.step: int | None = None  # None before the first evaluation
        self.loss = inf

    def record(self, step: int, loss: float) -> bool:
        """Record the loss after ``step`` steps; return whether it is the lowest so far. NaN never is."""
        if loss < self.loss:
            self.step, self.loss = step, loss
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON-serialisable values, for a checkpoint."""
        return {"step": self.step, "loss": None if self.step is None else self.loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.step = state["step"]
        self.loss = inf if self.step is None else state["loss"]
