"""The lowest validation loss of a run: whose checkpoint is kept, and after how many worse ones the run stops."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any


class BestLoss:
    """What evaluations after steps have come to; the same on every rank, and saved with each checkpoint.

    Args:
        patience: evaluations in a row without a lower loss that end the run; 0: none do.

    Attributes:
        step: after which the loss was lowest; None before the first evaluation.
        loss: that loss.
        num_worse: evaluations since then.
    """

    def __init__(self, patience: int = 0) -> None:
        self._patience = patience
        self.step: int | None = None
        self.loss, self.num_worse = inf, 0

    def see(self, step: int, loss: float) -> bool:
        """Whether the loss after ``step`` steps is the lowest; NaN never is."""
        if loss < self.loss:
            self.step, self.loss, self.num_worse = step, loss, 0
            return True
        self.num_worse += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether so many evaluations in a row were no better that the run shall stop."""
        return 0 < self._patience <= self.num_worse

    def state_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        loss = None if self.step is None else self.loss
        return {"step": self.step, "loss": loss, "num_worse": self.num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.step, self.num_worse = state["step"], state["num_worse"]
        self.loss = inf if self.step is None else state["loss"]
