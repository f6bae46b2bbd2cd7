"""What a rank sends and receives in one training step, message by message, before anything has run.

The engine itself is asked (`zeroshard.lab.predict.engine`), by the events of a model of which nothing is known but its
units. With P the padded bytes of all buffers and M micro-batches, the totals are those of the stage table:

    stage 0     all-reduce P
    stage 1     reduce-scatter P, all-gather P
    stage 2     reduce-scatter M P, all-gather P
    stage 3     reduce-scatter M P, all-gather M (2 P - root - last unit - embedding)

With R replicas, of state sharded over W / R ranks, these are what travels among the ranks that shard together; and each
reduce-scatter is followed by an all-reduce of the shard, P R / W bytes, over the replicas.

Control messages (which parameters were used, the norm) are a few bytes a step and not part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as accumulated
from operator import or_

from zeroshard.lab.predict.actions import Accumulate, Issue, Message, Settings, Step, sent
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.cluster import Cluster
from zeroshard.lab.predict.memory import OptimizerState
from zeroshard.lab.predict.model_spans import Event, Span, Trace
from zeroshard.lab.predict.step import step_of
from zeroshard.zero import MixedPrecision, ShardingStrategy


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
    flows: Sequence[bool] | None = None,
    leaves: int | None = None,
) -> list[Message]:
    """The collectives of a step that follows another, in the order of issue.

    It holds for a model that calls each unit once, in the order of ``buffers``.

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
        flows: for each unit but the root, whether a backward goes through it; None: through all of them.
        leaves: as `Zero` takes them.
    """
    units = tuple(dict.fromkeys(buffer.unit for buffer in buffers if buffer.unit != "root"))
    settings = Settings(
        strategy,
        precision or MixedPrecision(),
        num_micro,
        accumulate,
        prefetch,
        num_replicas,
        uniform_order,
        leaves=leaves,
    )
    events = _events([True] * len(units) if flows is None else flows)
    trace = Trace(units, tuple(map(Span, events)), input_bytes=0, tokens=0)
    return step_of(trace, buffers, OptimizerState(0), settings).messages()


def flows_of(buffers: Iterable[Buffer]) -> list[bool]:
    """`messages`' ``flows`` where nothing that runs before the units is trained: from the first unit that is."""
    trained: dict[str, bool] = {}
    for buffer in buffers:
        if buffer.unit != "root":
            trained[buffer.unit] = trained.get(buffer.unit, False) or buffer.trained
    return list(accumulated(trained.values(), or_))


def _events(flows: Sequence[bool]) -> Iterator[Event]:
    """Of a micro-batch in which each unit runs once; a reduction needs no gradient."""
    yield Event("forward_begins")
    for place, flow in enumerate(flows):
        yield Event("forward_begins", place)
        yield Event("forward_ends", place, grads_flow=flow)
    yield Event("forward_ends", grads_flow=True)
    yield Event("backward_begins")
    for place in reversed(range(len(flows))):
        if flows[place]:
            yield Event("backward_begins", place)
            yield Event("backward_ends", place)
    yield Event("backward_over")


def bytes_by_op(found: Iterable[Message]) -> dict[str, int]:
    """Bytes by operation."""
    total: Counter[str] = Counter()
    for message in found:
        total[message.op] += message.num_bytes
    return dict(total)


def bytes_of_step(step: Step) -> dict[str, int]:
    """`bytes_by_op` of ``step``, which may have more micro-batches than there is memory to list their messages."""
    total: Counter[str] = Counter()
    for actions, times in step.parts:
        for op, num_bytes in bytes_by_op(sent(actions)).items() if times else ():
            total[op] += times * num_bytes
    return dict(total)


def num_messages(step: Step) -> int:
    """Collectives of a step, without control messages."""
    return sum(times * len(sent(actions)) for actions, times in step.parts)


@dataclass(frozen=True)
class OnLink:
    """What a rank's step sends by one operation among so many ranks, without control messages.

    Attributes:
        op: of `Message`.
        num_ranks: that take part.
        link: ``within a node``, or ``between nodes`` where any of the bytes leave the node.
        count: collectives of a step.
        num_bytes: of their whole buffers.
    """

    op: str
    num_ranks: int
    link: str
    count: int
    num_bytes: int


def bytes_by_link(step: Step, cluster: Cluster) -> tuple[OnLink, ...]:
    """Bytes by operation, ranks and link, in the order in which the step first sends them."""
    found: dict[tuple[str, int, str], list[int]] = {}
    for actions, times in step.parts:
        for action in actions:
            if isinstance(action, Issue) and not action.control:
                message = action.message
                across = cluster.num_nodes(message.world_size, replicas=action.replicas) > 1
                key = message.op, message.world_size, "between nodes" if across else "within a node"
                total = found.setdefault(key, [0, 0])
                total[0] += times
                total[1] += times * message.num_bytes
    return tuple(OnLink(*key, *total) for key, total in found.items() if total[0])
