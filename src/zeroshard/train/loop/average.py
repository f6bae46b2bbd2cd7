"""The moving average of a run's weights follows each step that is taken."""

from __future__ import annotations

from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.train.records.records import Callback, Update
from zeroshard.zero.ema.average import Ema


class AverageFollows(Callback):
    """Updates ``ema`` after each step that was taken; its time counts as the update's."""

    def __init__(self, ema: Ema, clock: Stopwatch) -> None:
        self._ema, self._clock = ema, clock

    def on_update(self, update: Update) -> None:
        """Let the average follow, unless the step was skipped."""
        if update.taken:
            with self._clock.span("update"):
                self._ema.update()
