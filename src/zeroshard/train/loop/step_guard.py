"""Decides which steps to skip: those with a NaN/Inf loss or gradient and, optionally, those whose loss spikes.

One update with a NaN ruins every weight for good. A NaN on one rank reaches all of them through the reduction, while
rank 0's own loss may still be finite. So the decision uses values that are the same on every rank, the mean loss and
the global gradient norm, before the update. A skipped step uses up its data but not its learning rate.

A *spike* is a loss above ``mean + k * deviation`` of the last `WINDOW` steps that were taken; often one broken document
causes it. A loss that stays high is not a spike but a new level: after `max_in_a_row` spikes it is trained on.
Chowdhery et al. 2022, "PaLM", section 5.1, https://arxiv.org/abs/2204.02311, skipped batches around spikes by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import fmean, pstdev
from typing import Any, Literal

Verdict = Literal["taken", "overflow", "not finite", "spike"]

WINDOW = 64  # number of last losses that a loss is compared with
FEWEST = 16  # losses needed before a spike can be detected: the first ones fall too fast


class StepGuard:
    """Decides for each step whether to take it; has the same state on every rank, because all give it the same values.

    Args:
        max_in_a_row: number of NaN/Inf steps in a row after which the run is given up, and of spikes in a row after
            which the loss is taken for a new level; 1 or more.
        spike_sigma: number of standard deviations above the mean that make a spike; 0: spikes are not detected.

    Attributes:
        num_skipped: number of steps skipped so far.
    """

    def __init__(self, max_in_a_row: int = 10, spike_sigma: float = 0.0) -> None:
        self.max_in_a_row = max_in_a_row
        self.spike_sigma = spike_sigma
        self.num_skipped = 0
        self._not_finite_in_a_row = 0
        self._spikes_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float, *, overflow: bool = False) -> Verdict:
        """Decide whether to take a step, and count it.

        Args:
            loss: mean loss over all ranks.
            grad_norm: global gradient norm.
            overflow: whether gradients overflowed float16. Such a step is skipped, but not counted towards
                `max_in_a_row`, because a smaller loss scale fixes it.

        Returns:
            ``"taken"``, or why the step must be skipped.
        """
        verdict = "overflow" if overflow else self._verdict(loss, grad_norm)
        if verdict == "taken":
            self._losses.append(loss)
        else:
            self.num_skipped += 1
        self._not_finite_in_a_row = self._not_finite_in_a_row + 1 if verdict == "not finite" else 0
        self._spikes_in_a_row = self._spikes_in_a_row + 1 if verdict == "spike" else 0
        return verdict

    def _verdict(self, loss: float, grad_norm: float) -> Verdict:
        if not (isfinite(loss) and isfinite(grad_norm)):
            return "not finite"
        if self.spike_sigma and len(self._losses) >= FEWEST:
            deviation = pstdev(self._losses)
            if loss > fmean(self._losses) + self.spike_sigma * deviation:
                if self._spikes_in_a_row < self.max_in_a_row:
                    return "spike"
                self._losses.clear()  # a new level
        return "taken"

    @property
    def given_up(self) -> bool:
        """Whether `max_in_a_row` steps in a row had a NaN/Inf, so that the run should end."""
        return self._not_finite_in_a_row >= self.max_in_a_row

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs, as JSON-serialisable values."""
        return {
            "num_skipped": self.num_skipped,
            "not_finite_in_a_row": self._not_finite_in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_skipped = int(state["num_skipped"])
        self._not_finite_in_a_row = int(state["not_finite_in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._losses = deque(map(float, state["losses"]), maxlen=WINDOW)
