"""Whether `Replicas.step` is called where it belongs: once after each step of all optimizers.

Forgotten, replicas would never meet. Called for each backward, or before the optimizer's step, they would meet more
often than was asked for, and gradients of weights that a meeting has replaced would be stepped by.

[Note: Steps that were skipped]
    A `torch.amp.GradScaler` skips a step and tells nobody, also that of one optimizer of several. So gradients that
    wait for a step when `Replicas.step` is called are barred, and are a mistake only if their optimizer steps by them
    later: who skips a step clears them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.unit import FlatGroup

_WAITED = (
    "zero.replicas.step() was called while gradients waited for this step; call it once after the steps of all "
    "optimizers, and not after each backward"
)


class StepOrder:
    """What has happened since the last `Replicas.step`."""

    def __init__(self) -> None:
        self._stepped: list[Optimizer] = []
        self._members: set[nn.Parameter] = set()  # of those that have stepped

    def stepped(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """The optimizer has stepped; raises RuntimeError where it did so before, without `ends` in between."""
        if any(optimizer is known for known in self._stepped):
            raise RuntimeError(
                "step: replicas take local steps and would never meet; call zero.replicas.step() after each step of "
                "the optimizer"
            )
        self._stepped.append(optimizer)
        self._members |= members

    def ends(self, groups: Iterable[FlatGroup], *, taken: bool) -> None:
        """A step of all optimizers is over; ``taken``: nobody has said that it was skipped."""
        for group in groups if taken else ():
            for slot, param in enumerate(group.params.params):
                if group.grads.used[slot] and param not in self._members:
                    group.grads.barred.why[slot] = _WAITED
        self.forget()

    def forget(self) -> None:
        """Begin again, as after a load."""
        self._stepped.clear()
        self._members.clear()

    def require_counted(self, what: str) -> None:
        """Raise RuntimeError, in the name of ``what``, where a step of an optimizer was not followed by `ends`."""
        if self._stepped:
            raise RuntimeError(
                f"{what}: the optimizer has stepped, and zero.replicas.step() was not called since; call it first, or "
                "a resumed run would count a step less and meet at others"
            )
