"""Which steps are taken: not those whose numbers are not finite, nor, if the user likes, those whose loss leaps.

One step with a NaN spoils every weight for good, and NaN on one rank is NaN on all after the reduction, while the loss
that rank 0 sees of its own rows may still be finite. So the judgement is made on what is the same on every rank, the
mean loss and the global norm, before the update. A skipped step uses up its data but not its learning rate.

A *spike* is a loss above ``mean + k * deviation`` of the last `WINDOW` steps that were taken: often one broken
document. A loss that stays up is no spike but a new level, and is trained on after `max_in_a_row` steps. Chowdhery et
al. 2022, "PaLM", section 5.1, https://arxiv.org/abs/2204.02311, skipped batches around such spikes by hand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import isfinite
from statistics import fmean, pstdev
from typing import Any, Literal

Verdict = Literal["taken", "overflow", "not finite", "spike"]

WINDOW = 64  # losses that a spike is measured against
FEWEST = 16  # of them, before there is a verdict: the first losses fall too fast


class StepGuard:
    """Judges steps; the same on every rank, since it is asked the same.

    Args:
        max_in_a_row: steps in a row that are not finite, after which the run is given up, 1 or more.
        spike_sigma: how many standard deviations above the mean make a spike; 0: none are looked for.

    Attributes:
        num_skipped: steps that were not taken, so far.
    """

    def __init__(self, max_in_a_row: int = 10, spike_sigma: float = 0.0) -> None:
        self.max_in_a_row = max_in_a_row
        self.spike_sigma = spike_sigma
        self.num_skipped = 0
        self._not_finite_in_a_row = 0
        self._spikes_in_a_row = 0
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def judge(self, loss: float, grad_norm: float, *, overflow: bool = False) -> Verdict:
        """Whether a step may be taken; counts it.

        Args:
            loss: mean over all ranks.
            grad_norm: global.
            overflow: whether gradients left the range of float16, which a smaller loss scale mends: such steps do not
                count as steps in a row.
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
        """Whether so many steps in a row were not finite that going on makes no sense."""
        return self._not_finite_in_a_row >= self.max_in_a_row

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON can hold it."""
        return {
            "num_skipped": self.num_skipped,
            "not_finite_in_a_row": self._not_finite_in_a_row,
            "spikes_in_a_row": self._spikes_in_a_row,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s values."""
        self.num_skipped = int(state["num_skipped"])
        self._not_finite_in_a_row = int(state["not_finite_in_a_row"])
        self._spikes_in_a_row = int(state["spikes_in_a_row"])
        self._losses = deque(map(float, state["losses"]), maxlen=WINDOW)
