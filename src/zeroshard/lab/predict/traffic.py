"""Predicts the collectives of one training step of a rank, one by one.

The engine itself issues them (`zeroshard.lab.predict.engine`), on the events of a model of which only the units are
known. With P the padded bytes of all buffers and M micro-batches, the totals are those of the stage table:

    stage 0     all-reduce P
    stage 1     reduce-scatter P, all-gather P
    stage 2     reduce-scatter M P, all-gather P
    stage 3     reduce-scatter M P, all-gather M (2 P - root - last unit - embedding)

With R replicas, state is sharded over W / R ranks. The table then counts the traffic among the ranks that shard
together, and each reduce-scatter is followed by an all-reduce of the shard, P R / W bytes, over the replicas.

Control messages (which parameters were used, the norm) are a few bytes per step and are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate as accumulated
from operator import or_
from typing import Any

from zeroshard.lab.predict.actions import Issue, Message, Settings, Step
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
    flows: Sequence[bool] | None = None,
    **settings: Any,
) -> list[Message]:
    """The collectives of any step but the first, in the order of issue: `collectives` with these `Settings`."""
    chosen = Settings(strategy, precision or MixedPrecision(), **settings)
    return collectives(buffers, chosen, flows=flows).messages()


def collectives(buffers: Sequence[Buffer], settings: Settings, *, flows: Sequence[bool] | None = None) -> Step:
    """A step, any but the first, in which nothing is computed: its collectives are those of a model's.

    The result is right for a model that calls each unit once, in the order of ``buffers``.

    Args:
        buffers: the model's flat buffers, root first, laid out for the ranks that shard together.
        settings: the engine's settings; what a step does beside its collectives has no effect.
        flows: for each unit but the root, whether a backward goes through it; None: through all of them.
    """
    units = tuple(dict.fromkeys(buffer.unit for buffer in buffers if buffer.unit != "root"))
    events = list(_events([True] * len(units) if flows is None else flows))
    trace = Trace(units, tuple(map(Span, events)), input_bytes=0, tokens=0)
    return step_of(trace, buffers, settings, OptimizerState(0))


def flows_of(buffers: Iterable[Buffer]) -> list[bool]:
    """The ``flows`` of `messages` if nothing before the units is trained: True from the first trained unit on."""
    trained: dict[str, bool] = {}
    for buffer in buffers:
        if buffer.unit != "root":
            trained[buffer.unit] = trained.get(buffer.unit, False) or buffer.trained
    return list(accumulated(trained.values(), or_))


def _events(flows: Sequence[bool]) -> Iterator[Event]:
    """Events of a micro-batch in which each unit runs once, without ``grad`` events: reductions do not need them."""
    yield Event("pre_forward")
    for place, flow in enumerate(flows):
        yield Event("pre_forward", place)
        yield Event("post_forward", place, grads_flow=flow)
    yield Event("post_forward", grads_flow=True)
    yield Event("pre_backward")
    for place in reversed(range(len(flows))):
        if flows[place]:
            yield Event("pre_backward", place)
            yield Event("post_backward", place)
    yield Event("backward_over")


def bytes_by_op(found: Iterable[Message | OnLink]) -> dict[str, int]:
    """Bytes of the collectives in ``found``, by operation."""
    total: Counter[str] = Counter()
    for each in found:
        total[each.op] += each.num_bytes
    return dict(total)


@dataclass(frozen=True)
class OnLink:
    """A rank's collectives of one operation and group size in a step, without control messages."""

    op: str  # the operation, as in `Message`
    num_ranks: int  # number of ranks that take part
    link: str  # ``within a node``, or ``between nodes`` if any of the bytes leave the node
    count: int  # number of such collectives in a step
    num_bytes: int  # bytes of their unsharded buffers together


def bytes_by_link(step: Step, cluster: Cluster) -> tuple[OnLink, ...]:
    """Bytes by operation, number of ranks and link, in the order in which the step first uses them."""
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
