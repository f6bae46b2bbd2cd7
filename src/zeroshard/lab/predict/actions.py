"""A predicted step as data: what a rank computes, sends and waits for, its memory, and the engine's settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.lab.predict.work import Work
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.strategy import SHARD

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


@dataclass(frozen=True)
class Compute:
    """Operations, one after the other; ``unit``: during whose turn."""

    unit: str
    phase: Phase
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Issue:
    """A collective is started, after what was computed before it; ``number`` names it.

    ``replicas``: among the ranks that hold the same shard, or have the same place in each node. ``control``: a few
    bytes that all ranks must hear.
    ``work``: what a GPU computes before it on the collective's own stream, beside what else is computed.
    """

    number: int
    message: Message
    unit: str
    phase: Phase
    replicas: bool = False
    control: bool = False
    work: tuple[Work, ...] = ()


@dataclass(frozen=True)
class Wait:
    """The stream that computes waits until collective ``number`` is done."""

    number: int
    unit: str
    phase: Phase


Action = Compute | Issue | Wait


@dataclass(frozen=True)
class Moment:
    """The fullest moment of a step.

    Attributes:
        by_category: bytes by `CATEGORIES`.
        where: the unit and the phase.
    """

    by_category: dict[str, int]
    where: str

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        first, middle, last: actions of micro-batches; ``first`` and ``middle`` are empty where there are not as many.
        num_middle: how many there are like ``middle``.
        update: actions of the optimizer's step.
        peak: of memory.
        start, before_update, after_update: bytes by category after initialisation, before and after the optimizer's
            first step: the three points at which `Zero.memory_bytes` may be compared.
        tokens: of this rank.
        at_loss: the fullest moment between the forward of the last block and its backward, when all activations and a
            model's logits are there; None where the root unit computes nothing then.
        host_bytes: of this rank's state in the memory of its host, where a plan offloads it.
        offloaded_numel: elements that the host updates for this rank.
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
    host_bytes: int = 0
    offloaded_numel: int = 0

    @property
    def parts(self) -> tuple[tuple[list[Action], int], ...]:
        """Its actions in order, and how many times they are taken: millions of micro-batches are one list."""
        return ((self.first, 1), (self.middle, self.num_middle), (self.last, 1), (self.update, 1))

    def messages(self) -> list[Message]:
        """The collectives of the step in order of issue, without control messages; of each micro-batch its own."""
        return [message for actions, times in self.parts for message in sent(actions) * times]


def sent(actions: Iterable[Action]) -> list[Message]:
    """The collectives among ``actions`` in order of issue, without control messages."""
    return [action.message for action in actions if isinstance(action, Issue) and not action.control]


@dataclass(frozen=True)
class Settings:
    """How the engine is set; as `zeroshard.Zero` takes it.

    Attributes:
        strategy: the row.
        precision: the dtype policy.
        num_micro: micro-batches of a step.
        accumulate: None: as the row's `grads` column says.
        prefetch: units ahead.
        num_replicas: the world size by the ``shard_size``.
        uniform_order: of the communicator.
        device_type: ``"cpu"`` or ``"cuda"``.
        fused_copies: whether the optimizer writes 16-bit weights beside their masters, as `FusedAdamW` does.
        rank: among those that shard together.
        clips: whether the norm of the gradients is taken, and they are scaled, before the optimizer's step.
        agrees: whether ranks agree on the loss, and on going on, in a message of their own, as the trainer's do.
        frees_grads: whether a unit's gradients go as soon as they are reduced: the optimizer steps inside backward, or
            they go to the host. No engine of ours does; in a plan alone.
        offloads: whether masters and the optimizer's states are the host's; in a plan alone.
        leaves: as `zeroshard.Zero` takes them; the buffers are laid out for as many.
    """

    strategy: ShardingStrategy
    precision: MixedPrecision = field(default_factory=MixedPrecision)
    num_micro: int = 1
    accumulate: Accumulate | None = None
    prefetch: int = 1
    num_replicas: int = 1
    uniform_order: bool = True
    device_type: str = "cpu"
    fused_copies: bool = False
    rank: int = 0
    clips: bool = True
    agrees: bool = False
    frees_grads: bool = False
    offloads: bool = False
    leaves: int | None = None

    def nodes_of(self, num_shards: int) -> int | None:
        """Ranks of a node in which gradients are added up before they travel; None: they travel in one exchange.

        Stage 0 has no such exchange, and where there are replicas the sum inside one is it.
        """
        fits = self.num_replicas == 1 and self.strategy.optim is SHARD and num_shards > 1
        return self.precision.node_size if fits else None

    @property
    def reduces_each_backward(self) -> bool:
        """Whether every micro-batch's backward reduces gradients; else the last one does, for all of the step."""
        by_column: Accumulate = "sharded" if self.strategy.grads is SHARD else "local"
        return self.leaves is not None or (self.accumulate or by_column) == "sharded"

    @property
    def num_reductions(self) -> int:
        """Backwards of a step that reduce gradients."""
        return self.num_micro if self.reduces_each_backward else 1
