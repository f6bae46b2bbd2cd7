"""Gradients by which no optimizer may step, and why: they are of other weights than those that it would change."""

from __future__ import annotations

from collections.abc import Iterable, Set


class Barred:
    """Those of one buffer, by slot, until they are cleared.

    Attributes:
        why: slot -> why, for the user.
        now: why those that come now are barred; None: they are not.
    """

    def __init__(self) -> None:
        self.why: dict[int, str] = {}
        self.now: str | None = None

    def came(self, slot: int) -> None:
        """A gradient is added to what is in this slot."""
        if self.now is not None:
            self.why[slot] = self.now

    def cleared(self, slots: Set[int]) -> None:
        """The gradients in these slots are gone, or were replaced."""
        if self.why:
            self.why = {slot: why for slot, why in self.why.items() if slot not in slots}


def bar(buffers: Iterable[Barred], whose: str | None, where: str) -> None:
    """Bar the gradients that come from now on, for others visit in the weights' place.

    Args:
        buffers: of the whole model.
        whose: the gradients are, "the anchors" say; None: the weights are back, and nothing that comes is barred.
        where: the block in which they visit, as the user calls it.
    """
    why = (
        f"the gradients are of {whose}, by a backward inside {where}; call zero_grad() once they are read, and run the "
        "backward of a step outside"
    )
    for each in buffers:
        each.now = None if whose is None else why
