"""Checks that `OuterSteps.step` is called once after each step of all optimizers.

If it were never called, there would be no outer step. If it were called after each backward, or before the optimizer's
step, outer steps would come too often, and an optimizer would use gradients of weights that an outer step has replaced.

[Note: Steps that were skipped]
    A `torch.amp.GradScaler` skips a step silently, possibly that of one optimizer among several. So gradients that
    wait for a step when `OuterSteps.step` is called are no error yet. They are marked unusable
    (`zeroshard.zero.core.gradients`): their optimizer raises if it steps by them later. A loop that skips a
    step clears them instead.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.unit import FlatGroup

_WAITED = (
    "zero.local_steps.step() was called before an optimizer had stepped with these gradients; call it once after the "
    "steps of all optimizers, and not after each backward"
)


class StepOrder:
    """Records which optimizers have stepped since the last `OuterSteps.step`."""

    def __init__(self) -> None:
        self._stepped: list[Optimizer] = []
        self._members: set[nn.Parameter] = set()  # parameters of the optimizers that have stepped

    def stepped(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Record a step of the optimizer; raises RuntimeError if it has stepped before without `ends` in between."""
        if any(optimizer is known for known in self._stepped):
            raise RuntimeError(
                "step: the optimizer stepped twice without zero.local_steps.step(), so there would be no outer step; "
                "call it after each step of the optimizer"
            )
        self._stepped.append(optimizer)
        self._members |= members

    def ends(self, groups: Iterable[FlatGroup], *, taken: bool) -> None:
        """End a step of all optimizers; ``taken``: False if the caller says that this replica has skipped it."""
        for group in groups if taken else ():
            for slot, param in enumerate(group.params.params):
                if group.grads.used[slot] and param not in self._members:
                    group.grads.unusable[slot] = _WAITED  # [Note: Steps that were skipped]
        self.forget()

    def forget(self) -> None:
        """Forget the recorded steps, as after a load."""
        self._stepped.clear()
        self._members.clear()

    def require_counted(self, what: str) -> None:
        """Raise RuntimeError about ``what`` if a step of an optimizer was not followed by `ends`."""
        if self._stepped:
            raise RuntimeError(
                f"{what}: the optimizer has stepped, and zero.local_steps.step() was not called since; call it first, "
                "or a resumed run would count a step less and take its outer steps at others"
            )
