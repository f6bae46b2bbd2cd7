"""`Replicas`: the replicas of an engine that takes local steps, and their meetings.

Inside a replica the engine is that of a world of ``shard_size`` ranks, whatever its stage: its gradients, norms and
control messages never leave the replica. What leaves it is here: first weights, differences, statistics of modules.

[Note: The same order everywhere]
    Which fragments leave and which arrive follows from the number of steps alone, so every rank issues the same
    collectives at the same step. A replica that skips an update (its loss was NaN) still calls `step`; told so, it
    marks its weights stale as an update would have, so that its next forward issues the gathers of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.comm import CONTROL, scope
from zeroshard.zero.buffers.barred import bar
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.levels import Levels
from zeroshard.zero.replicas.local_steps import LocalSteps
from zeroshard.zero.replicas.outer import Outer
from zeroshard.zero.replicas.step_order import StepOrder
from zeroshard.zero.runtime.module_buffers import ModuleBuffers
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.sharded_optimizer.agreement import agreement
from zeroshard.zero.transfer import as_bytes, put_bytes


@dataclass(frozen=True)
class Meeting:
    """A fragment's difference that was taken in.

    Attributes:
        step: steps done when it left; with overlap it arrives later.
        fragment: which part of the units.
        num_bytes: that this rank gave to the all-reduce over replicas.
        difference_norm: L2 norm of the mean difference, over all ranks of a replica; the same on every rank.
        num_replicas: over how many the mean was taken.
    """

    step: int
    fragment: int
    num_bytes: int
    difference_norm: float
    num_replicas: int


class ReplicaDivergedError(RuntimeError):
    """A difference is not finite: some replica's weights are not. On every rank."""


class Replicas:
    """What `Zero.replicas` is: call `step` after each step of the optimizer.

    Args:
        settings: how they meet.
        runtime: of the engine.
        levels: the whole world, a replica, the ranks that hold the same shard.
        buffers: of the model, made alike over replicas at meetings.

    Attributes:
        comm: the ranks that hold the same shard, one of each replica.
        shard: the ranks of this replica.
        left: the fragments whose differences left at the last `step`.
        num_steps: steps done, of the optimizer or skipped.
        applied: whether anchors are in the place of the local weights.
        before_change: called before a meeting changes weights and anchors, which a save may still read.
    """

    def __init__(self, settings: LocalSteps, runtime: Runtime, levels: Levels, buffers: ModuleBuffers) -> None:
        settings.check_units(len(runtime.all_units()))
        with agreement(levels.world, "replicas", "give every rank the same LocalSteps") as described:
            described.append(str(settings))
        self.settings, self.comm, self.shard, self._world = settings, levels.replicas, levels.shard, levels.world
        self._runtime, self._buffers = runtime, buffers
        self._outer: dict[tuple[Unit, int], Outer] = {}
        self._sent: dict[int, tuple[int, int]] = {}  # by fragment on its way: steps when it left, bytes
        self.order = StepOrder()
        self.num_steps = 0
        self.left: list[int] = []
        self.applied = False
        self.rests = True  # whether local weights are the anchors, so that none is to be saved beside them
        self.before_change: Callable[[], None] = lambda: None

    # -- what the engine tells ----------------------------------------------------------------------------------

    def begin_alike(self) -> None:
        """Give every replica the weights and buffers of the first. Collective, before a step."""
        for group in self._runtime.groups():
            with scope(f"{group.params.name}/start"):
                self.comm.broadcast(group.params.master, src=0).wait()
        with scope("buffers/start"):
            for buffer in self._runtime.root.module.buffers():
                content = as_bytes(buffer)
                self.comm.broadcast(content, src=0).wait()
                put_bytes(buffer, content)
        self._runtime.masters_replaced()

    def begin_anchors(self) -> None:
        """Weights are about to be changed: those that nobody has trained before are anchors now."""
        for key, group in self.groups():
            if group.trained or any(group.grads.used):
                self.outer_of(key, group)

    def after_update(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """The optimizer of ``members`` has stepped.

        Raises:
            RuntimeError: it did so before, and `step` was not called in between.
        """
        self.order.stepped(optimizer, members)
        self.rests = False

    def begin_again(self) -> None:
        """All weights were replaced: the first replica's are everybody's anchors, without momentum. Collective."""
        self.begin_alike()
        for key, group in self.groups():
            if key in self._outer:
                self._outer[key].begin_again(group)
        self._sent.clear()
        self.rests = True

    def keep_anchors(self) -> None:
        """Make the anchors the weights for good. Collective."""
        self.unsent()
        with torch.no_grad():
            for _, group, outer in [] if self.rests else list(self.by_group()):
                outer.show(group)
        self._runtime.masters_replaced()
        self.rests = True

    def unsent(self) -> None:
        """Wait for what is on its way, and leave it out."""
        for _, group, outer in self.by_group():
            outer.drop(group)
        self._sent.clear()

    def require_local(self, what: str) -> None:
        """Raise RuntimeError, in the name of ``what``, while anchors are in the place of the local weights."""
        if self.applied:
            raise RuntimeError(f"{what}: the anchors are in the place of the weights; leave replicas.anchors() first")

    def require_rest(self, what: str) -> None:
        """Raise RuntimeError, in the name of ``what``, where a replica has weights of its own."""
        if not self.rests:
            raise RuntimeError(
                f"{what}: each replica has weights of its own between meetings; do it before the first step, or after "
                "zero.replicas.meet()"
            )

    def require_same_layout(self, moving: bool) -> None:
        """Raise RuntimeError where parameters are to move to other buffers and anchors have the old ones."""
        if moving and self._outer:
            raise RuntimeError(
                "optimizer: it needs a new layout, and the anchors of replicas have the old one; make it before the "
                "first step"
            )

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, *, taken: bool = True) -> list[Meeting]:
        """One more step is done, of all optimizers together: meet, if it is time. Collective.

        Call it after each step of the optimizer, also one that a `GradScaler` has skipped, and not after each backward.

        Args:
            taken: False where this replica skipped its update; then too it must be called.

        Returns:
            The fragments whose differences were taken in now; usually none.

        Raises:
            RuntimeError: a difference is not finite, on every rank; inside `anchors` or `Zero.full_params`.
        """
        self.require_local("replicas.step")
        self._runtime.require_unpinned("replicas.step")
        self.order.ends((group for _, group in self.groups()), taken=taken)
        self.begin_anchors()  # of a replica whose first step was skipped
        self.num_steps += 1
        if not taken:
            self._mark_stale(group for _, group in self.groups())
        met = self._take_in([each for each in self._sent if self._due(each) <= self.num_steps])
        self.left = leaving = self.settings.leaving(self.num_steps)
        if leaving:
            met += self._take_in([each for each in leaving if each in self._sent])  # of a run with another `every`
            self._send(leaving)
            if not self.settings.overlap_steps:
                met += self._take_in(leaving)
                self.rests = self.settings.fragments == 1
        return met

    def meet(self) -> list[Meeting]:
        """Have all fragments meet now, without overlap, as at the end of a training. Collective.

        What is on its way is taken in first. Afterwards every replica has the same weights, the anchors.
        """
        self.require_local("replicas.meet")
        self._runtime.require_unpinned("replicas.meet")
        met = self._take_in(list(self._sent))
        everything = list(range(self.settings.fragments))
        self._send(everything)
        met += self._take_in(everything, stays=0.0)
        self.rests = True
        return met

    def meets(self, num_steps: int) -> bool:
        """Whether replicas talk to each other once so many steps are done: differences leave or are taken in."""
        settings = self.settings
        return bool(settings.leaving(num_steps)) or self.takes_in(num_steps)

    def takes_in(self, num_steps: int) -> bool:
        """Whether differences are taken in once so many steps are done: nothing is on its way to be waited for."""
        return bool(self.settings.leaving(num_steps - self.settings.overlap_steps))

    def _send(self, fragments: list[int]) -> None:
        with torch.no_grad():
            for fragment in fragments:
                num_bytes = sum(
                    outer.send(group, self.comm, self.settings, self.num_steps) for group, outer in self._in(fragment)
                )
                self._sent[fragment] = (self.num_steps, num_bytes)
        self._sync_buffers()

    def _take_in(self, fragments: list[int], stays: float | None = None) -> list[Meeting]:
        if not fragments:
            return []
        stays = self.settings.stays if stays is None else stays
        self.arrive(fragments)
        norms = self._norms(fragments)
        for fragment, norm in zip(fragments, norms, strict=True):
            if not math.isfinite(norm):
                raise ReplicaDivergedError(
                    f"replicas: after step {self._sent[fragment][0]} the difference of fragment {fragment} has norm "
                    f"{norm}: the weights of a replica have diverged; lower lr, or resume from the last checkpoint"
                )
        self.before_change()
        met = []
        with torch.no_grad():
            for fragment, norm in zip(fragments, norms, strict=True):
                for group, outer in self._under_way(fragment):
                    outer.step(self.settings)
                    outer.show(group, stays)
                    self._mark_stale([group])
                step, num_bytes = self._sent.pop(fragment)
                met.append(Meeting(step, fragment, num_bytes, norm, self.comm.world_size))
        return met

    def arrive(self, fragments: list[int] | None = None) -> None:
        """See to it that what left has arrived, or will once it is waited for; None: all. Collective.

        In a block format that takes a second collective, which is issued here at the latest.
        """
        for fragment in list(self._sent) if fragments is None else fragments:
            for group, outer in self._in(fragment):
                outer.go_on(group)

    def _norms(self, fragments: list[int]) -> list[float]:
        """Of each fragment's mean difference, over a replica's ranks. Collective."""
        sums = []
        for fragment in fragments:
            arrived = [outer.difference() for _, outer in self._in(fragment)]
            norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in arrived if each is not None]
            sums.append(torch.stack(norms).square().sum().cpu() if norms else torch.zeros((), dtype=torch.float64))
        message = torch.stack(sums).to(self.shard.control_device)
        if self.shard.world_size > 1:
            with scope(CONTROL):
                self.shard.all_reduce(message).wait()
        return message.sqrt().tolist()

    def _sync_buffers(self) -> None:
        changed = self._buffers.changed()
        if not changed:
            return
        message = torch.tensor(changed, dtype=torch.uint8, device=self.comm.control_device)
        with scope(CONTROL):
            self.comm.all_reduce(message, "max").wait()
        self._buffers.sync([bool(flag) for flag in message.tolist()])

    def _mark_stale(self, groups: Iterator[FlatGroup] | list[FlatGroup]) -> None:
        for group in groups:
            torch.autograd.graph.increment_version(group.params.params)  # no backward through a graph from before
            group.params.mark_stale()

    # -- anchors ------------------------------------------------------------------------------------------------

    @contextmanager
    def anchors(self) -> Generator[None]:
        """In this block the model computes with the anchors, the same on every replica: evaluate them. Collective.

        Where local weights are the anchors already, they stay. Else this rank holds a copy of its local masters.
        Gradients of this block may be read, and no optimizer steps by them.
        """
        self.require_local("anchors")
        with nullcontext() if self.still_rests() else self._shown():
            self._visit("the anchors")  # at rest too: who trains in this block is told so at the first step
            try:
                yield
            finally:
                self._visit(None)

    def _visit(self, whose: str | None) -> None:
        self.applied = whose is not None
        bar((group.grads.barred for _, group in self.groups()), whose, "replicas.anchors()")

    @contextmanager
    def _shown(self) -> Generator[None]:
        self._runtime.take_changes()
        local = [(group, outer, group.params.master.clone()) for _, group, outer in self.by_group()]
        with torch.no_grad():
            for group, outer, _ in local:
                outer.show(group)
        self._runtime.masters_replaced("for now")
        try:
            yield
        finally:
            with torch.no_grad():
                for group, _, master in local:
                    group.params.master.copy_(master)
            self._runtime.masters_replaced("back")

    def still_rests(self) -> bool:
        """Whether local weights are the anchors: not any more where some were written into since. Collective."""
        if not self.rests:
            return False
        self._runtime.take_changes()
        written = any(not outer.is_shown(group) for _, group, outer in self.by_group())
        flag = torch.tensor([written], dtype=torch.uint8, device=self._world.control_device)
        with scope(CONTROL):
            self._world.all_reduce(flag, "max").wait()
        self.rests = not flag.item()
        return self.rests

    @property
    def num_bytes(self) -> int:
        """Of anchors and momentum on this rank."""
        return sum(outer.num_bytes for outer in self._outer.values())

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """``(unit, tensor)`` of all that is held now: anchors, momentum, differences on their way."""
        return [(unit.name, tensor) for (unit, _), outer in self._outer.items() for tensor in outer.tensors]

    def by_group(self) -> Iterator[tuple[tuple[Unit, int], FlatGroup, Outer]]:
        """Every group with what it keeps for meetings; groups that were never trained keep nothing."""
        for key, group in self.groups():
            if key in self._outer:
                yield key, group, self._outer[key]

    def loaded(self, num_steps: int, sent: dict[int, tuple[int, int]], *, rests: bool) -> None:
        """Go on as of a checkpoint, whose anchors are there already."""
        self.num_steps, self._sent, self.rests = num_steps, sent, rests
        self.order.forget()

    def outer_of(self, key: tuple[Unit, int], group: FlatGroup) -> Outer:
        """What a group keeps for meetings, begun if need be."""
        if key not in self._outer:
            self._outer[key] = Outer(group, self.settings, self._world.rank)
        return self._outer[key]

    def fragment_of(self, unit: Unit) -> int:
        """The fragment that a unit is in."""
        return self.settings.fragment_of(self._runtime.all_units().index(unit))

    def left_at(self, fragment: int) -> int | None:
        """After how many steps the difference left that is on its way; None where none is."""
        return self._sent[fragment][0] if fragment in self._sent else None

    def _due(self, fragment: int) -> int:
        dues = [outer.due for _, outer in self._under_way(fragment) if outer.due is not None]
        return max(dues, default=self.num_steps)

    def _in(self, fragment: int) -> list[tuple[FlatGroup, Outer]]:
        return [(group, outer) for (unit, _), group, outer in self.by_group() if self.fragment_of(unit) == fragment]

    def _under_way(self, fragment: int) -> list[tuple[FlatGroup, Outer]]:
        """Those of a fragment that sent something: others are trained since, or were in no fragment that did."""
        return [(group, outer) for group, outer in self._in(fragment) if outer.due is not None]

    def groups(self) -> Iterator[tuple[tuple[Unit, int], FlatGroup]]:
        """Every group of floating-point parameters, with its unit and its place there."""
        for unit in self._runtime.all_units():
            for index, group in enumerate(unit.groups):
                if group.params.master.is_floating_point():
                    yield (unit, index), group
