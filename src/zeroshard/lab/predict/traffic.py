"""What a rank sends and receives in one training step, message by message, before anything has run.

The order is the engine's: it is read from the same schedule (`zeroshard.zero.runtime.schedule`). With P the padded
bytes of
all buffers and M micro-batches, the totals are those of the stage table:

    stage 0     all-reduce P
    stage 1     reduce-scatter P, all-gather P
    stage 2     reduce-scatter M P, all-gather P
    stage 3     reduce-scatter M P, all-gather M (2 P - root - last unit)

With R replicas, of state sharded over W / R ranks, these are what travels among the ranks that shard together; and each
reduce-scatter is followed by an all-reduce of the shard, P R / W bytes, over the replicas.

Control messages (which parameters were used, the norm) are a few bytes a step and not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from zeroshard.lab.predict.buffers import Buffer
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.runtime.schedule import ROOT, backward_ops
from zeroshard.zero.strategy import SHARD

Accumulate = Literal["local", "sharded"]


@dataclass(frozen=True)
class Message:
    """One collective.

    Attributes:
        op: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        num_bytes: of the whole buffer, as `zeroshard.comm.CommRecord` counts them.
        buffer: its name.
        phase: ``"weights"`` or ``"grads"``.
        world_size: how many ranks take part.
    """

    op: str
    num_bytes: int
    buffer: str
    phase: str
    world_size: int


def messages(
    buffers: Sequence[Buffer],
    strategy: ShardingStrategy,
    precision: MixedPrecision | None = None,
    *,
    num_micro: int = 1,
    accumulate: Accumulate | None = None,
    prefetch: int = 1,
    uniform_order: bool = True,
    num_replicas: int = 1,
) -> list[Message]:
    """The collectives of a step that follows another, in the order of issue.

    It holds for a model that calls each unit once, in the order of ``buffers``, and trains each parameter.

    Args:
        buffers: of the model, root first, laid out for the world size in question, or the ``shard_size`` where there
            is one.
        strategy: the row.
        precision: the dtype policy.
        num_micro: micro-batches of the step.
        accumulate: as `Zero` takes it.
        prefetch: as `Zero` takes it; it moves messages and adds none.
        uniform_order: of the communicator.
        num_replicas: ranks that hold the same shard: the world size by ``shard_size``.
    """
    plan = _Plan(buffers, strategy, precision or MixedPrecision(), uniform_order, num_replicas)
    by_column: Accumulate = "sharded" if strategy.grads is SHARD else "local"
    found: list[Message] = []
    for micro in range(num_micro):
        last = micro == num_micro - 1
        found += plan.forward(first=micro == 0)
        found += plan.backward(prefetch, sync=last or (accumulate or by_column) == "sharded")
    return found


def bytes_by_op(found: Iterable[Message]) -> dict[str, int]:
    """Bytes by operation."""
    total: Counter[str] = Counter()
    for message in found:
        total[message.op] += message.num_bytes
    return dict(total)


class _Plan:
    """The messages of one forward and of one backward."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        strategy: ShardingStrategy,
        precision: MixedPrecision,
        uniform_order: bool,
        num_replicas: int,
    ) -> None:
        self.strategy, self.precision, self.uniform_order = strategy, precision, uniform_order
        self.num_replicas = num_replicas
        units: dict[str, list[Buffer]] = {"root": []}
        for buffer in buffers:
            units.setdefault(buffer.unit, []).append(buffer)
        self.root, *self.units = units.values()
        world_size = max((buffer.layout.world_size for buffer in buffers), default=1)
        self.shard_params = strategy.params is SHARD and world_size > 1
        self.shard_optim = strategy.optim is SHARD and world_size > 1

    def forward(self, *, first: bool) -> Iterator[Message]:
        """Stale weights once a step; sharded ones each time."""
        for unit in (self.root, *self.units):
            for buffer in unit:
                if self.shard_params or (self.shard_optim and first and buffer.trained):
                    yield self._gather(buffer)

    def backward(self, prefetch: int, *, sync: bool) -> Iterator[Message]:
        gather = self.shard_params and self.strategy.reshard_after_forward
        reduced: list[Buffer] = []  # in this rank's group: what the replicas add up next
        for op in backward_ops(len(self.units), prefetch=prefetch, gather=gather):
            unit = self.root if op.place == ROOT else self.units[op.place]
            if op.action == "gather":
                if unit is not self.units[-1]:  # its weights have stayed since forward
                    yield from map(self._gather, unit)
            elif sync:
                trained = [buffer for buffer in unit if buffer.trained]
                for buffer in trained:
                    yield from self._reduce(buffer)
                yield from map(self._reduce_across, reduced)
                reduced = trained if self.num_replicas > 1 else []
        yield from map(self._reduce_across, reduced)

    def _gather(self, buffer: Buffer) -> Message:
        itemsize = self.precision.compute_dtype(buffer.dtype).itemsize
        num_bytes = buffer.layout.padded_numel * itemsize
        return Message("all_gather", num_bytes, buffer.name, "weights", buffer.layout.world_size)

    def _reduce(self, buffer: Buffer) -> Iterator[Message]:
        layout = buffer.layout
        num_bytes = layout.padded_numel * self.precision.gradient_dtype(buffer.dtype).itemsize
        if self.strategy.optim is SHARD:
            if layout.world_size > 1 or self.num_replicas == 1:
                yield Message("reduce_scatter", num_bytes, buffer.name, "grads", layout.world_size)
        elif self.uniform_order:
            yield Message("all_reduce", num_bytes, buffer.name, "grads", layout.world_size)
        else:
            yield Message("reduce_scatter", num_bytes, buffer.name, "grads", layout.world_size)
            yield Message("all_gather", num_bytes, buffer.name, "grads", layout.world_size)

    def _reduce_across(self, buffer: Buffer) -> Message:
        num_bytes = buffer.layout.shard_numel * self.precision.gradient_dtype(buffer.dtype).itemsize
        return Message("all_reduce", num_bytes, buffer.name, "grads", self.num_replicas)
