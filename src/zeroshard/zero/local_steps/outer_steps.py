"""`OuterSteps`: the outer steps of an engine whose replicas take local steps.

Inside a replica the engine works as in a world of its ranks, at any stage: gradients, norms and control
collectives stay inside. All communication between replicas is here: of initial weights, differences, and statistics of
modules. See `zeroshard.zero.local_steps.settings`.

[Note: The same order everywhere]
    Which fragments take an outer step depends on the number of steps alone, so every rank issues the same
    collectives at the same step. A replica that skips an update (its loss was NaN) still calls ``step(taken=False)``:
    it marks its weights stale, as an update would have done, so that its next forward issues the others' gathers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import CONTROL, labelled
from zeroshard.comm.agree import agreement
from zeroshard.comm.every_rank import by_every_rank
from zeroshard.comm.module_buffers import ModuleBuffers
from zeroshard.comm.tensor_broadcast import as_bytes, put_bytes
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.local_steps.outer_optimizer import Difference, Outer
from zeroshard.zero.local_steps.settings import LocalSteps
from zeroshard.zero.local_steps.step_order import StepOrder
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.runtime.unsharded_weights import mark_unusable


@dataclass(frozen=True)
class OuterStep:
    """An outer step of one fragment: its mean difference was applied to the global weights.

    Attributes:
        step: steps done.
        fragment: the number of the fragment.
        num_bytes: bytes that this rank gave to the all-reduce over replicas, in a block format to the all-to-all.
        difference_norm: L2 norm of the mean difference, over all ranks of a replica; the same on every rank.
        num_replicas: number of replicas over which the mean was taken.
    """

    step: int
    fragment: int
    num_bytes: int
    difference_norm: float
    num_replicas: int


class ReplicaDivergedError(RuntimeError):
    """A mean difference has NaN/Inf, because the weights of some replica have. Raised on every rank."""


class OuterSteps:
    """The outer steps of an engine, as `Zero.local_steps`: call `step` after each step of the optimizer.

    Args:
        settings: when and how replicas take outer steps.
        runtime: the engine's runtime.
        rank_groups: the communicators of the whole world, of a replica, and of the ranks that hold the same shard.
        buffers: the model's buffers, which are synchronised over replicas at outer steps.

    Attributes:
        comm: the ranks that hold the same shard, one of each replica.
        shard: the ranks of this replica.
        num_steps: steps done, including skipped ones.
        applied: whether global weights are in the place of the local weights.
        before_change: called before an outer step changes local and global weights, which a save may still read.
    """

    def __init__(self, settings: LocalSteps, runtime: Runtime, rank_groups: RankGroups, buffers: ModuleBuffers) -> None:
        settings.check_units(len(runtime.all_units()))
        with agreement(rank_groups.world, "local_steps", "give every rank the same LocalSteps") as described:
            described.append(str(settings))
        self.settings, self._world = settings, rank_groups.world
        self.comm, self.shard = rank_groups.replicate_group, rank_groups.shard_group
        self._runtime, self._buffers = runtime, buffers
        self._outer: dict[tuple[FlatUnit, int], Outer] = {}
        self.order = StepOrder()
        self.num_steps = 0
        self.applied = False
        self.at_global_weights = True  # whether local weights are the global ones, not to be saved apart
        self.before_change: Callable[[], None] = lambda: None

    # -- what the engine calls ----------------------------------------------------------------------------------

    def begin_alike(self) -> None:
        """Give every replica the weights and buffers of the first. Collective, before a step."""
        for group in self._runtime.groups():
            with labelled(f"{group.params.name}/start"):
                self.comm.broadcast(group.params.master, src=0).wait()
        with labelled("buffers/start"):
            for buffer in self._runtime.root.module.buffers():
                content = as_bytes(buffer)
                self.comm.broadcast(content, src=0).wait()
                put_bytes(buffer, content)
        self._runtime.weights.refresh_after_replacement()

    def begin_global_weights(self) -> None:
        """Before weights change: of groups that are trained for the first time the current weights become global."""
        for key, group in self.groups():
            if group.trained or any(group.grads.used):
                self.outer_of(key, group)

    def after_update(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Record that the optimizer of ``members`` has stepped.

        Raises:
            RuntimeError: it has stepped before, and `step` was not called in between.
        """
        self.order.stepped(optimizer, members)
        self.at_global_weights = False

    def restart_from_first(self) -> None:
        """Restart after weights were replaced: the first replica's become global, without momentum. Collective."""
        self.begin_alike()
        for key, group in self.groups():
            if key in self._outer:
                self._outer[key].restart_from_first(group)
        self.at_global_weights = True

    def keep_global_weights(self) -> None:
        """Make the global weights the model's for good. Collective."""
        with torch.no_grad():
            for _, group, outer in [] if self.at_global_weights else list(self.by_group()):
                outer.show(group)
        self._runtime.weights.refresh_after_replacement()
        self.at_global_weights = True

    def require_local(self, what: str) -> None:
        """Raise RuntimeError about ``what`` while global weights are in the place of local ones."""
        if self.applied:
            raise RuntimeError(
                f"{what}: global weights are in the place of local ones; leave local_steps.global_weights() first"
            )

    # -- the step -----------------------------------------------------------------------------------------------

    @by_every_rank
    def step(self, *, taken: bool = True) -> list[OuterStep]:
        """Count one more step of all optimizers together, and take an outer step of the fragments due. Collective.

        Call it after each step of the optimizer, even one that a `GradScaler` has skipped, but not after each backward.

        Args:
            taken: False if this replica skipped its update; even then this must be called.

        Returns:
            The outer steps; usually none.

        Raises:
            RuntimeError: a difference has NaN/Inf, on every rank; or inside `global_weights` or `Zero.full_params`.
        """
        self.require_local("local_steps.step")
        self._runtime.require_unpinned("local_steps.step")
        self.order.ends((group for _, group in self.groups()), taken=taken)
        self.begin_global_weights()  # for a replica whose first step was skipped
        self.num_steps += 1
        if not taken:  # [Note: The same order everywhere]
            self._mark_stale(group for _, group in self.groups())
        fragments = self.settings.fragments_at(self.num_steps)
        if not fragments:
            return []
        steps = self._outer_step(fragments)
        self.at_global_weights = self.settings.fragments == 1
        return steps

    @by_every_rank
    def outer_step(self) -> list[OuterStep]:
        """Take an outer step of all fragments now, as at the end of training. Collective.

        After it all replicas have the global weights.
        """
        self.require_local("local_steps.outer_step")
        self._runtime.require_unpinned("local_steps.outer_step")
        steps = self._outer_step(list(range(self.settings.fragments)))
        self.at_global_weights = True
        return steps

    def _outer_step(self, fragments: list[int]) -> list[OuterStep]:
        with torch.no_grad():
            sent = {
                fragment: [
                    (group, outer, Difference(outer, group, self.comm, self.settings, self.num_steps))
                    for (unit, _), group, outer in self.by_group()
                    if self.settings.fragment_of(self._runtime.all_units().index(unit)) == fragment
                ]
                for fragment in fragments
            }
            self._sync_buffers()
            for parts in sent.values():
                for _, _, difference in parts:
                    difference.issue_gather()
            norms = self._norms([[difference.mean() for _, _, difference in parts] for parts in sent.values()])
        for fragment, norm in zip(fragments, norms, strict=True):
            if not math.isfinite(norm):
                raise ReplicaDivergedError(
                    f"local_steps: after step {self.num_steps} the difference of fragment {fragment} has norm {norm}: "
                    "the weights of a replica have diverged; lower lr, or resume from the last checkpoint"
                )
        self.before_change()
        steps = []
        with torch.no_grad():
            for (fragment, parts), norm in zip(sent.items(), norms, strict=True):
                for group, outer, difference in parts:
                    outer.step(difference.mean(), self.settings)
                    outer.show(group)
                    self._mark_stale([group])
                num_bytes = sum(difference.num_bytes for _, _, difference in parts)
                steps.append(OuterStep(self.num_steps, fragment, num_bytes, norm, self.comm.world_size))
        return steps

    def _norms(self, means: Iterable[list[Tensor]]) -> list[float]:
        """The norm of each fragment's mean difference, over a replica's ranks. Collective."""
        sums = []
        for fragment in means:
            norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in fragment]
            sums.append(torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64))
        message = torch.stack(sums).to(self.shard.control_device)
        if self.shard.world_size > 1:
            with labelled(CONTROL):
                self.shard.all_reduce(message).wait()
        return message.sqrt().tolist()

    def _sync_buffers(self) -> None:
        changed = self._buffers.votes()
        if not changed:
            return
        message = torch.tensor(changed, dtype=torch.uint8, device=self.comm.control_device)
        with labelled(CONTROL):
            self.comm.all_reduce(message, "max").wait()
        self._buffers.agreed(message.tolist())

    def _mark_stale(self, groups: Iterator[FlatGroup] | list[FlatGroup]) -> None:
        for group in groups:
            torch.autograd.graph.increment_version(group.params.params)  # backward through an old graph raises
            group.params.mark_stale()

    # -- global weights -----------------------------------------------------------------------------------------

    @by_every_rank
    @contextmanager
    def global_weights(self) -> Generator[None]:
        """In this block, as to evaluate them, the model computes with the global weights. Collective.

        They are the same on every replica. If local weights are the global ones already, they stay. Else this rank
        keeps a copy of its local master weights. Gradients of this block may be read, but no optimizer steps by them.
        """
        self.require_local("global_weights")
        with nullcontext() if self.still_at_global_weights() else self._shown():
            # Even if nothing was swapped: training in this block must raise at its step.
            self._visit("the global weights")
            try:
                yield
            finally:
                self._visit(None)

    def _visit(self, whose: str | None) -> None:
        self.applied = whose is not None
        mark_unusable((group.grads for _, group in self.groups()), whose, "local_steps.global_weights()")

    @contextmanager
    def _shown(self) -> Generator[None]:
        self._runtime.take_changes()
        local = [(group, outer, group.params.master.clone()) for _, group, outer in self.by_group()]
        with torch.no_grad():
            for group, outer, _ in local:
                outer.show(group)
        self._runtime.weights.refresh_after_replacement("for now")
        try:
            yield
        finally:
            with torch.no_grad():
                for group, _, master in local:
                    group.params.master.copy_(master)
            self._runtime.weights.refresh_after_replacement("back")

    def still_at_global_weights(self) -> bool:
        """Whether local weights are still the global weights: no longer if any were written to since. Collective."""
        if not self.at_global_weights:
            return False
        self._runtime.take_changes()
        written = any(not outer.is_shown(group) for _, group, outer in self.by_group())
        flag = torch.tensor([written], dtype=torch.uint8, device=self._world.control_device)
        with labelled(CONTROL):
            self._world.all_reduce(flag, "max").wait()
        self.at_global_weights = not flag.item()
        return self.at_global_weights

    @property
    def num_bytes(self) -> int:
        """Bytes of global weights and momentum on this rank."""
        return sum(outer.num_bytes for outer in self._outer.values())

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """``(unit's name, tensor)`` of all resident tensors: global weights and momentum."""
        return [(unit.name, tensor) for (unit, _), outer in self._outer.items() for tensor in outer.tensors]

    def by_group(self) -> Iterator[tuple[tuple[FlatUnit, int], FlatGroup, Outer]]:
        """Every group with its `Outer`, without the groups that were never trained: they have none."""
        for key, group in self.groups():
            if key in self._outer:
                yield key, group, self._outer[key]

    def loaded(self, num_steps: int, *, at_global_weights: bool) -> None:
        """Resume from a checkpoint, whose global weights are loaded already."""
        self.num_steps, self.at_global_weights = num_steps, at_global_weights
        self.order.forget()

    def outer_of(self, key: tuple[FlatUnit, int], group: FlatGroup) -> Outer:
        """The `Outer` of a group; made at the first call."""
        if key not in self._outer:
            self._outer[key] = Outer(group, self.settings, self._world.rank)
        return self._outer[key]

    def groups(self) -> Iterator[tuple[tuple[FlatUnit, int], FlatGroup]]:
        """``((unit, index in the unit), group)`` of every group of floating-point parameters."""
        for unit in self._runtime.all_units():
            for index, group in enumerate(unit.groups):
                if group.params.master.is_floating_point():
                    yield (unit, index), group
