"""What the weights of a buffer tell of themselves, for whoever watches reads of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from zeroshard.zero.buffers.flat_params import FlatParams


class Reads:
    """Watches no reads; `zeroshard.zero.guards.outdated` does."""

    def watch(self, weights: FlatParams) -> None:
        """The parameters' values are stale or freed, and users may read them."""

    def unwatch(self, params: Iterable[nn.Parameter]) -> None:
        """The parameters' values are current, or about to be, or users cannot read them now."""
