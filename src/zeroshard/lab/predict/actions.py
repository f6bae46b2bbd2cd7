"""Data types of a predicted step: a rank's computation, collectives, waits and memory, and the engine's settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.lab.predict.work import Work
from zeroshard.settings.engine import EngineChoices
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.core.strategy import SHARD

CATEGORIES = (
    "params",
    "master",
    "optimizer",
    "grads",
    "unit_buffers",
    "prefetch",
    "activations",
    "temporaries",
    "others",
)
Phase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Message:
    """One collective."""

    op: str  # ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``
    num_bytes: int  # bytes of the unsharded buffer, as `zeroshard.comm.CommRecord` counts them
    buffer: str  # the flat buffer's name; ``attention`` of ranks that share sequences
    phase: str  # ``"weights"`` or ``"grads"``; ``sequence``
    world_size: int  # number of ranks that take part


@dataclass(frozen=True)
class Compute:
    """Operations that run one after the other."""

    work: tuple[Work, ...]


@dataclass(frozen=True)
class Issue:
    """Starts a collective, which reads the results of the computation before it; ``number`` identifies it.

    ``replicas``: whether it runs among the ranks that hold the same shard, or that have the same place in each node.
    ``sequence``: whether it runs among the ranks that share a sequence.
    ``control``: whether it is a control message of a few bytes.
    ``work``: what a GPU computes first on the collective's own stream, which overlaps with other computation.
    """

    number: int
    message: Message
    replicas: bool = False
    control: bool = False
    work: tuple[Work, ...] = ()
    sequence: bool = False

    @property
    def group(self) -> str:
        """Whose communicator it belongs to: collectives of one run one after the other."""
        return "replicas" if self.replicas else "sequence" if self.sequence else "shards"


@dataclass(frozen=True)
class Wait:
    """The compute stream waits until collective ``number`` is done."""

    number: int


Action = Compute | Issue | Wait


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a step, such as its peak."""

    by_category: dict[str, int]  # bytes by `CATEGORIES`
    where: str  # the unit that is running, and the phase

    @property
    def total(self) -> int:
        """Live bytes of all categories together."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Step:
    """A predicted step of one rank.

    Attributes:
        first, middle, last: actions of a micro-batch. A step of one micro-batch has only ``last``; one of two has no
            ``middle``.
        num_middle: number of micro-batches that are like ``middle``.
        update: actions of the optimizer's step.
        peak: the moment of peak memory.
        start, before_update, after_update: resident bytes by category after initialisation, before and after the
            optimizer's first step: the three points at which they can be compared with `Zero.memory_bytes`.
        tokens: tokens that this rank trains on.
        at_loss: the peak between the forward of the last block and its backward, when all activations and the model's
            logits are live; None if the root unit computes nothing then.
    """

    first: list[Action]
    middle: list[Action]
    num_middle: int
    last: list[Action]
    update: list[Action]
    peak: Moment
    start: dict[str, int]
    before_update: dict[str, int]
    after_update: dict[str, int]
    tokens: int
    at_loss: Moment | None = None

    @property
    def parts(self) -> tuple[tuple[list[Action], int], ...]:
        """The step's actions in order, each list with its repetitions: millions of micro-batches share one list."""
        return ((self.first, 1), (self.middle, self.num_middle), (self.last, 1), (self.update, 1))

    def messages(self) -> list[Message]:
        """The collectives of the step in order of issue, without control messages, repeated for each micro-batch."""
        return [message for actions, times in self.parts for message in sent(actions) * times]


def sent(actions: Iterable[Action]) -> list[Message]:
    """The collectives among ``actions`` in order of issue, without control messages."""
    return [action.message for action in actions if isinstance(action, Issue) and not action.control]


@dataclass(frozen=True)
class Settings(EngineChoices):
    """The engine's settings, as `zeroshard.Zero` takes them, and those of the step around it."""

    strategy: ShardingStrategy  # the row of the stage table
    precision: MixedPrecision = field(default_factory=MixedPrecision)  # the dtype policy
    num_micro: int = 1  # micro-batches of a step
    num_replicas: int = 1  # of the ranks that shard together
    uniform_order: bool = True  # the communicator's `zeroshard.comm.Communicator.uniform_order`
    device_type: str = "cpu"  # ``"cpu"`` or ``"cuda"``
    rank: int = 0  # this rank's number among those that shard together
    clips: bool = True  # whether gradients are clipped by their norm before the optimizer's step
    # whether ranks exchange the loss, and whether to continue, in a control message, as the trainer's do
    agrees: bool = False

    def nodes_of(self, num_shards: int) -> int | None:
        """Ranks of a node if gradients are summed inside each node before they are exchanged between nodes, else None.

        None at stage 0, and with replicas, because then the reduction inside a replica already does this.
        """
        fits = self.num_replicas == 1 and self.strategy.optim is SHARD and num_shards > 1
        return self.precision.node_size if fits else None

    @property
    def reduces_each_backward(self) -> bool:
        """Whether every micro-batch's backward reduces gradients; if not, the last one does so for the whole step."""
        by_column = "sharded" if self.strategy.grads is SHARD else "local"
        return self.reproducible is not None or (self.accumulate or by_column) == "sharded"

    @property
    def num_reductions(self) -> int:
        """Number of backwards in a step that reduce gradients."""
        return self.num_micro if self.reduces_each_backward else 1
