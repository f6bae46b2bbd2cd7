"""`GradientReduction`: how the gradients of one flat buffer become the reduced shard that this rank's optimizer sees.

A reduction is one or more collectives. Each may be issued when the one before it is done, at the same place in every
rank's order. `GradientReducer` begins the reductions of one buffer, and keeps what outlives one of them. These are the
members; a new one is a subclass of `GradientReducer`, and a line in `zeroshard.zero.transport.members`:

| reducer          | a reduction                                                          | collectives |
|------------------|----------------------------------------------------------------------|-------------|
| `GradientReducer`| all-reduce (stage 0) or reduce-scatter; with replicas then the sum   | 1 or 2      |
|                  | of the shard over them                                               |             |
| `PackedReducer`  | the same in a wire format: `PackedReduce`, over nodes `NodeReduce`,  | 1, 2 or 3   |
|                  | over replicas `AcrossReplicas`                                       |             |
| `ExactReducer`   | exact sums, for the same bits on any number of ranks:                | 1 or 2      |
|                  | `ExactReduction`                                                     |             |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from zeroshard.comm import Communicator, Work
from zeroshard.zero.core.layout import FlatLayout


class GradientReduction(Protocol):
    """One reduction of a buffer, of a local sum that was given to its constructor.

    Attributes:
        num_left: collectives that are still to be issued.
    """

    num_left: int

    @property
    def packed(self) -> Tensor | None:
        """The buffer of gradients that arrive; None: they arrive in the target."""
        ...

    def issue(self, target: Tensor) -> Work:
        """Issue the next collective; ``target``: as `deliver` is given, or the local sum's own shard before it."""
        ...

    def deliver(self, target: Tensor) -> None:
        """Write the sum to ``target [shard_numel]``, once all collectives are done; it may be there already."""
        ...


class GradientReducer:
    """Begins the reductions of one buffer, and is the plain one: gradients are sent and summed in their own dtype.

    Args:
        comm: the ranks that hold the shards.
        replicate_group: the ranks that hold the same shard as this one.
        layout: layout of the buffer.
        everywhere: whether every rank needs the sum of all shards, because its optimizer is replicated.
    """

    accumulates = False  # whether a reduction's result contains the gradients reduced before

    def __init__(
        self, comm: Communicator, replicate_group: Communicator, layout: FlatLayout, *, everywhere: bool
    ) -> None:
        self.comm, self.replicate_group, self.layout, self.everywhere = comm, replicate_group, layout, everywhere

    def begin(self, local: Tensor) -> GradientReduction:
        """Return a reduction of ``local [padded_numel]``, whose values are undefined after it. Collective."""
        plain = PlainReduction(self.comm, self.layout, local, everywhere=self.everywhere)
        return plain if self.replicate_group.world_size == 1 else OverReplicas(plain, self.replicate_group)

    def target(self, reduced: Tensor | None, fresh: Callable[[], Tensor]) -> Tensor:
        """Return the tensor that the next reduction writes: ``fresh()``, or ``reduced``, to which it adds."""
        return fresh()

    @property
    def needs_even_shards(self) -> bool:
        """Whether shards must have one length."""
        return self.replicate_group.world_size > 1

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are resident between reductions."""
        return []

    def end_step(self) -> None:
        """Record that gradients are cleared, or set to zero."""

    def clear(self) -> None:
        """Drop what was accumulated."""

    @property
    def saved_step(self) -> int | None:
        """The step of the next reduction, which checkpoints keep; None: reductions are the same in each step."""
        return None

    def load_step(self, step: int) -> None:
        """Continue at the step that a checkpoint has for this buffer."""

    def resume_at(self, step: int) -> None:
        """Continue at the run's step, unless `load_step` has set another."""

    def continue_from(self, other: GradientReducer) -> None:
        """Continue as ``other``, the reducer of the same parameters in another layout or at another stage."""


class PlainReduction:
    """A reduce-scatter of ``local`` over ``comm``, or an all-reduce if all ranks need all of it."""

    packed = None

    def __init__(self, comm: Communicator, layout: FlatLayout, local: Tensor, *, everywhere: bool) -> None:
        self._comm, self._layout, self._local, self._everywhere = comm, layout, local, everywhere
        self.num_left = 1

    def issue(self, target: Tensor) -> Work:
        """Issue the collective."""
        self.num_left = 0
        if self._everywhere:
            return self._layout.all_reduce(self._comm, self._local)
        return self._layout.reduce(self._comm, target, self._local)

    def deliver(self, target: Tensor) -> None:
        """The collective has written the target."""


class OverReplicas:
    """A reduction in the shard group, then the all-reduce of its shard over the replicate group."""

    packed = None

    def __init__(self, within: PlainReduction, replicate_group: Communicator) -> None:
        self._within, self._replicate_group = within, replicate_group
        self.num_left = 2

    def issue(self, target: Tensor) -> Work:
        """Issue the reduction in the shard group; once it is done, the all-reduce."""
        self.num_left -= 1
        return self._within.issue(target) if self.num_left else self._replicate_group.all_reduce(target)

    def deliver(self, target: Tensor) -> None:
        """The all-reduce has written the target."""
