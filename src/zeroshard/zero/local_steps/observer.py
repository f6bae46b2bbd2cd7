"""`LocalStepsObserver`: how an engine's steps, saves and loads take its replicas along."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm.module_buffers import BufferSync, ModuleBuffers
from zeroshard.optim.classes.probe import weights_kept
from zeroshard.optim.named_shards import NamedShard, ShardReader
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.local_steps import checkpoints
from zeroshard.zero.local_steps.outer_steps import OuterSteps
from zeroshard.zero.local_steps.settings import LocalSteps
from zeroshard.zero.optimizers.observer import Observer
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.runtime.runtime import Runtime


def attached(
    settings: LocalSteps, runtime: Runtime, rank_groups: RankGroups, buffers: BufferSync
) -> tuple[OuterSteps, LocalStepsObserver]:
    """Return the outer steps of an engine, and their observer. Collective."""
    over_replicas = ModuleBuffers(runtime.root.module, rank_groups.replicate_group, buffers)
    outer_steps = OuterSteps(settings, runtime, rank_groups, over_replicas)
    return outer_steps, LocalStepsObserver(outer_steps)


class LocalStepsObserver(Observer):
    """Tells ``outer_steps`` of the engine's events, and answers for them."""

    category = "outer"
    parts_weights = True

    def __init__(self, outer_steps: OuterSteps) -> None:
        self._outer_steps = outer_steps

    def optimizer_comes(self, piecewise: PiecewiseOptimizer) -> None:
        """Refuse an optimizer that keeps weights in its state."""
        kind, make = type(piecewise.optimizer), piecewise.make
        try:
            kept = weights_kept(kind, make.keywords, piecewise.optimizer.param_groups)
        except Exception as error:  # whatever a user's class raises
            raise ValueError(
                f"optimizer_cls: {kind.__name__} could not be tried for local steps ({error}); "
                "give another class, or leave out local_steps"
            ) from error
        if kept is not None:
            raise ValueError(
                f"optimizer_cls: {kind.__name__} {kept}, which an outer step replaces; give one that keeps "
                "moments of gradients alone, such as AdamW, or leave out local_steps"
            )

    def layout_changes(self) -> None:
        """Refuse it once there are global weights."""
        if any(self._outer_steps.by_group()):
            raise RuntimeError(
                "optimizer: it needs a new layout, and the global weights have the old one; make it before the first "
                "step"
            )

    def before_step(self, members: set[nn.Parameter]) -> None:
        """Make current weights the first global weights."""
        self._outer_steps.begin_global_weights()

    def after_step(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Record the step, to which a call of `OuterSteps.step` belongs."""
        self._outer_steps.after_update(optimizer, members)

    def weights_replaced(self) -> None:
        """Restart from the first replica's."""
        self._outer_steps.restart_from_first()

    def resumes_at(self, step: int) -> None:
        """Count steps on, if the checkpoint has no count for replicas."""
        self._outer_steps.num_steps = self._outer_steps.num_steps or step

    def require_weights(self, what: str) -> None:
        """Raise RuntimeError while global weights are in the place of the weights."""
        self._outer_steps.require_local(what)

    def require_common(self, what: str) -> None:
        """Raise RuntimeError if each replica has weights of its own."""
        if not self._outer_steps.at_global_weights:
            raise RuntimeError(
                f"{what}: each replica has weights of its own between outer steps; do it before the first step, or "
                "after zero.local_steps.outer_step()"
            )

    def shards(self, written: Iterator[NamedShard]) -> Iterator[NamedShard]:
        """Global weights in the place of weights, and what replicas do not share under names of their own."""
        self._outer_steps.order.require_counted("named_shards")
        yield from checkpoints.named_shards(self._outer_steps, written)

    def reader(self, reader: ShardReader) -> ShardReader:
        """This replica's own weights and states, if they were checkpoints."""
        return checkpoints.ReplicaReader(reader, self._outer_steps.comm.rank)

    def load(self, reader: ShardReader) -> None:
        """Load global weights and momentum."""
        checkpoints.load(self._outer_steps, reader)

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """Global weights and momentum."""
        return self._outer_steps.tensors
