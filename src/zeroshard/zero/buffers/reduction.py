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

from typing import Protocol

from torch import Tensor

from zeroshard.zero.core.gradients import GradientReducer


class RoundingSteps(Protocol):
    """The steps that number the stochastic roundings of one buffer."""

    @property
    def next_step(self) -> int:
        """The step of the next rounding, which checkpoints keep."""
        ...

    def end_step(self) -> None:
        """Record that gradients are cleared, or set to zero."""
        ...

    def loaded(self, step: int) -> None:
        """Continue at the step that a checkpoint has for this buffer."""
        ...

    def begin_at(self, step: int) -> None:
        """Continue at the run's step, unless `loaded` has set another."""
        ...

    def resume_at(self, step: int) -> None:
        """Continue at this step."""
        ...


class StatefulReducer(GradientReducer):
    """The plain reducer, which keeps nothing; its subclasses may keep a sum, or number their roundings.

    Attributes:
        accumulates: whether a reduction's result contains the gradients reduced before.
        rounding: numbers the steps of a reducer that rounds stochastically; None: reductions are the same in each step.
    """

    accumulates = False
    rounding: RoundingSteps | None = None

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
