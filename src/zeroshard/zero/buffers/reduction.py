"""`StatefulReducer`: a `GradientReducer` that may keep something between reductions, as the engine's reducers do.

A new one is a subclass, and a line in `zeroshard.zero.transport.members`:

| reducer           | a reduction                                                          | collectives |
|-------------------|----------------------------------------------------------------------|-------------|
| `StatefulReducer` | `GradientReduction`: all-reduce (stage 0) or reduce-scatter; with    | 1 or 2      |
|                   | replicas then the sum of the shard over them                         |             |
| `PackedReducer`   | the same in a wire format: `PackedReduce`, over nodes `NodeReduce`,  | 1, 2 or 3   |
|                   | over replicas `AcrossReplicas`                                       |             |
| `ExactReducer`    | exact sums, for the same bits on any number of ranks:                | 1 or 2      |
|                   | `ExactReduction`                                                     |             |
"""

from __future__ import annotations

from torch import Tensor

from zeroshard.settings.wire_formats import Rounding
from zeroshard.zero.core.gradients import GradientReducer


class StatefulReducer(GradientReducer):
    """The plain reducer, which keeps nothing; its subclasses may keep a sum, or number their roundings.

    Attributes:
        accumulates: whether a reduction's result contains the gradients reduced before.
        rounding: numbers the steps of a reducer that rounds stochastically; None: reductions are the same in each step.
    """

    accumulates = False
    rounding: Rounding | None = None

    @property
    def needs_even_shards(self) -> bool:
        """Whether shards must have one length."""
        return self.replicate_group.world_size > 1

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are resident between reductions."""
        return []

    def follow(self, reduced: Tensor | None) -> None:
        """Before the next reduction adds to ``reduced``: take over what a user has written there."""

    def clear(self) -> None:
        """Drop what was accumulated."""

    def continue_from(self, other: StatefulReducer) -> None:
        """Continue as ``other``, the reducer of the same parameters in another layout or at another stage."""
        if self.rounding is not None and other.rounding is not None:
            self.rounding.resume_at(other.rounding.next_step)
