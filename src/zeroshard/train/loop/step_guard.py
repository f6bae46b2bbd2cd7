"""Decides which steps to skip: those with a NaN/Inf loss or gradient.

One update with a NaN ruins every weight for good. A NaN on one rank reaches all of them through the reduction, while
rank 0's own loss may still be finite. So the decision uses values that are the same on every rank, the mean loss and
the global gradient norm, before the update. A skipped step uses up its data but not its learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal

Verdict = Literal["taken", "overflow", "not finite"]


class StepGuard:
    """Decides for each step whether to take it; has the same state on every rank, because all give it the same values.

    After ``max_in_a_row`` NaN/Inf steps in a row the run is given up. ``num_skipped``: steps skipped so far.
    """

    def __init__(self, max_in_a_row: int = 10) -> None:
        self.max_in_a_row = max_in_a_row
        self.num_skipped = self._not_finite_in_a_row = 0

    def judge(self, loss: float, grad_norm: float, *, overflow: bool = False) -> Verdict:
        """Return ``"taken"`` or why the step must be skipped, from the loss and norm over all ranks, and count it.

        ``overflow``: whether gradients overflowed float16. Such a step is skipped, but not counted towards
        `max_in_a_row`, because a smaller loss scale fixes it.
        """
        verdict: Verdict = "taken" if isfinite(loss) and isfinite(grad_norm) else "not finite"
        verdict = "overflow" if overflow else verdict
        self.num_skipped += verdict != "taken"
        self._not_finite_in_a_row = self._not_finite_in_a_row + 1 if verdict == "not finite" else 0
        return verdict

    @property
    def given_up(self) -> bool:
        """Whether `max_in_a_row` steps in a row had a NaN/Inf, so that the run should end."""
        return self._not_finite_in_a_row >= self.max_in_a_row

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON-serialisable values."""
        return {"num_skipped": self.num_skipped, "not_finite_in_a_row": self._not_finite_in_a_row}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_skipped = int(state["num_skipped"])
        self._not_finite_in_a_row = int(state["not_finite_in_a_row"])
