"""Gradients with which no optimizer may step, because they were computed at other weights than it would update.

Such gradients come from a backward inside ``ema.weights()`` or ``local_steps.global_weights()``.
"""

from __future__ import annotations

from collections.abc import Iterable, Set


class UnusableGrads:
    """The unusable gradients of one flat buffer, by slot, until they are cleared.

    Attributes:
        why: slot -> the reason, for the user.
        now: the reason why gradients that arrive now are unusable; None: they are usable.
    """

    def __init__(self) -> None:
        self.why: dict[int, str] = {}
        self.now: str | None = None

    def record_added(self, slot: int) -> None:
        """Record that a gradient was added to this slot; it is unusable if `now` says so."""
        if self.now is not None:
            self.why[slot] = self.now

    def forget(self, slots: Set[int]) -> None:
        """Forget these slots, because their gradients were cleared or replaced."""
        if self.why:
            self.why = {slot: why for slot, why in self.why.items() if slot not in slots}


def mark_unusable(buffers: Iterable[UnusableGrads], whose: str | None, where: str) -> None:
    """Let no optimizer step by gradients that arrive while other values are in the weights' place for a block.

    Args:
        buffers: all flat buffers of the model.
        whose: the values whose gradients these are, such as "the global weights"; None: the weights are back.
        where: the block, as the user writes it.
    """
    why = (
        f"these are gradients of {whose}, from a backward inside {where}; call zero_grad() after reading them, and run "
        f"the backward of a step outside {where}"
    )
    for each in buffers:
        each.now = None if whose is None else why
