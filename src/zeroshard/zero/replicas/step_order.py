"""Whether `Replicas.step` is called where it belongs: once after each step of all optimizers.

Forgotten, replicas would never meet. Called for each backward, or before the optimizer's step, they would meet more
often than was asked for, and gradients of weights that a meeting has replaced would be stepped by.

[Note: Steps that were skipped]
    A `torch.amp.GradScaler` skips a step and tells nobody. So that gradients wait for a step when `Replicas.step` is
    called is remembered, and is a mistake only if the optimizer steps by them later: who skips a step clears them.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.unit import FlatGroup


class StepOrder:
    """What has happened since the last `Replicas.step`."""

    def __init__(self) -> None:
        self._stepped: list[Optimizer] = []
        self._waited: dict[FlatGroup, int] = {}  # gradients that waited at `ends`, by how often they had been cleared

    def require_before(self, members: set[nn.Parameter]) -> None:
        """Raise RuntimeError where `ends` came between the backward and the step of the optimizer of ``members``."""
        for group, num_cleared in self._waited.items():
            if group.grads.rounding.num_cleared == num_cleared and not members.isdisjoint(group.params.params):
                raise RuntimeError(
                    "step: zero.replicas.step() was called while gradients waited for this step; call it once after "
                    "each step of the optimizer, and not after each backward"
                )

    def stepped(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped; raises RuntimeError where it did so before, without `ends` in between."""
        if any(optimizer is known for known in self._stepped):
            raise RuntimeError(
                "step: replicas take local steps and would never meet; call zero.replicas.step() after each step of "
                "the optimizer"
            )
        self._stepped.append(optimizer)

    def ends(self, groups: Iterable[FlatGroup], *, taken: bool) -> None:
        """A step of all optimizers is over; ``taken``: nobody has said that it was skipped."""
        early = taken and not self._stepped
        waiting = [group for group in groups if early and (group.grads.pending or group.grads.reduced is not None)]
        self._waited = {group: group.grads.rounding.num_cleared for group in waiting}
        self._stepped.clear()

    def forget(self) -> None:
        """Begin again, as after a load."""
        self._stepped.clear()
        self._waited.clear()

    def require_counted(self, what: str) -> None:
        """Raise RuntimeError, in the name of ``what``, where a step of an optimizer was not followed by `ends`."""
        if self._stepped:
            raise RuntimeError(
                f"{what}: the optimizer has stepped, and zero.replicas.step() was not called since; call it first, or "
                "a resumed run would count a step less and meet at others"
            )
