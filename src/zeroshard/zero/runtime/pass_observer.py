"""`PassObserver`: what is told of an engine's forwards and gradients, and may refuse them."""

from __future__ import annotations

from zeroshard.zero.buffers.unit import FlatGroup


class PassObserver:
    """Refuses nothing; `zeroshard.zero.guards.pass_refusals` does not."""

    def forward_ends(self) -> None:
        """The model returns, before its weights are freed."""

    def grad_arrives(self, group: FlatGroup) -> None:
        """A gradient of the group is about to arrive; told only while `Runtime.may_have_read_stale` has units."""

    def require_shown(self, what: str) -> None:
        """``what`` needs gradients that are complete, and reduced over ranks."""
