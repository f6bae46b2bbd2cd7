"""What `Passes` asks of parts that others attach to it, and tells them; where none is attached it calls nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zeroshard.zero.core.schedule import Op


class GradSink(Protocol):
    """What parameters show as their ``grad``: `zeroshard.zero.runtime.grad_hooks` shows the average over ranks."""

    def begin_forward(self) -> None:
        """The model is called: take what was assigned to gradients, and hook parameters that are trained now."""

    def apply_assigned_grads(self) -> None:
        """Apply what the user assigned to ``param.grad``."""

    def show_grads(self) -> None:
        """A backward is over."""


class NestedUnits(Protocol):
    """Units inside of other units: `zeroshard.zero.runtime.nested_units`."""

    waiting: dict[Any, Op]  # the inner units whose turn has come, each with the operation that waits for the outer one

    def postpones(self, op: Op, order: Sequence[Any]) -> bool:
        """Whether the operation waits for the turn of a unit around its own, which is still to come."""
        ...

    def due(self, outer: Any) -> list[Op]:
        """What has waited for the turn of this unit, which is now."""
        ...


class LocalGrads(Protocol):
    """Looks at this rank's own gradients before they are reduced: `zeroshard.zero.guards.non_finite`."""

    def units(self) -> set[Any]:
        """The units at which it looks in the backward that begins."""
        ...

    def before_reduce(self, unit: Any) -> None:
        """The gradients of one of these units are about to be reduced."""

    def before_step(self) -> None:
        """An optimizer is about to step."""

    def cleared(self) -> None:
        """Gradients were cleared."""


class Voter(Protocol):
    """Has bytes of its own in the message by which ranks agree at the end of a backward."""

    def votes(self) -> Sequence[int]:
        """This rank's bytes (flags, say), equally many on every rank."""
        ...

    def agreed(self, votes: list[int]) -> None:
        """The maxima of these over ranks: for a flag, whether any rank has set it. May be collective, and may raise."""
