"""`Replicas`: the replicas of an engine that takes local steps, and their meetings.

Inside a replica the engine works as in a world of ``shard_size`` ranks, at any stage: gradients, norms and control
collectives stay inside. All communication between replicas is here: of initial weights, differences, and statistics of
modules. Replicas *meet* when a difference is applied: see `zeroshard.zero.replicas.local_steps`.

[Note: The same order everywhere]
    Which differences are sent and applied depends on the number of steps alone, so every rank issues the same
    collectives at the same step. A replica that skips an update (its loss was NaN) still calls ``step(taken=False)``:
    it marks its weights stale, as an update would have done, so that its next forward issues the others' gathers.
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
from zeroshard.comm.agree import agreement
from zeroshard.zero.buffers.barred import bar
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.levels import Levels
from zeroshard.zero.replicas.local_steps import LocalSteps
from zeroshard.zero.replicas.outer import Outer
from zeroshard.zero.replicas.step_order import StepOrder
from zeroshard.zero.runtime.module_buffers import ModuleBuffers
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.tensor_broadcast import as_bytes, put_bytes


@dataclass(frozen=True)
class Meeting:
    """A meeting of one fragment: its mean difference was applied to the anchor.

    Attributes:
        step: steps done when the difference was sent; with overlap it is applied later.
        fragment: the number of the fragment.
        num_bytes: bytes that this rank gave to the all-reduce over replicas.
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


class Replicas:
    """The replicas of an engine, as `Zero.replicas`: call `step` after each step of the optimizer.

    Args:
        settings: how the replicas meet.
        runtime: the engine's runtime.
        levels: the communicators of the whole world, of a replica, and of the ranks that hold the same shard.
        buffers: the model's buffers, which are synchronised over replicas at meetings.

    Attributes:
        comm: the ranks that hold the same shard, one of each replica.
        shard: the ranks of this replica.
        left: the fragments whose differences were sent at the last `step`.
        num_steps: steps done, including skipped ones.
        applied: whether anchors are in the place of the local weights.
        before_change: called before a meeting changes weights and anchors, which a save may still be reading.
    """

    def __init__(self, settings: LocalSteps, runtime: Runtime, levels: Levels, buffers: ModuleBuffers) -> None:
        settings.check_units(len(runtime.all_units()))
        with agreement(levels.world, "replicas", "give every rank the same LocalSteps") as described:
            described.append(str(settings))
        self.settings, self.comm, self.shard, self._world = settings, levels.replicas, levels.shard, levels.world
        self._runtime, self._buffers = runtime, buffers
        self._outer: dict[tuple[Unit, int], Outer] = {}
        self._sent: dict[int, tuple[int, int]] = {}  # by fragment in flight: steps done when it was sent, bytes
        self.order = StepOrder()
        self.num_steps = 0
        self.left: list[int] = []
        self.applied = False
        self.at_anchor = True  # whether local weights are the anchors and need not be saved beside them
        self.before_change: Callable[[], None] = lambda: None

    # -- what the engine calls ----------------------------------------------------------------------------------

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
        self._runtime.refresh_after_replacement()

    def begin_anchors(self) -> None:
        """Before weights change: make current weights the anchors of groups that are trained for the first time."""
        for key, group in self.groups():
            if group.trained or any(group.grads.used):
                self.outer_of(key, group)

    def after_update(self, optimizer: Optimizer, members: set[nn.Parameter]) -> None:
        """Record that the optimizer of ``members`` has stepped.

        Raises:
            RuntimeError: it has stepped before, and `step` was not called in between.
        """
        self.order.stepped(optimizer, members)
        self.at_anchor = False

    def restart_from_first(self) -> None:
        """Restart after weights were replaced: the first replica's become all anchors, without momentum. Collective."""
        self.begin_alike()
        for key, group in self.groups():
            if key in self._outer:
                self._outer[key].restart_from_first(group)
        self._sent.clear()
        self.at_anchor = True

    def keep_anchors(self) -> None:
        """Make the anchors the weights for good. Collective."""
        self.drop_in_flight()
        with torch.no_grad():
            for _, group, outer in [] if self.at_anchor else list(self.by_group()):
                outer.show(group)
        self._runtime.refresh_after_replacement()
        self.at_anchor = True

    def drop_in_flight(self) -> None:
        """Wait for differences in flight, and drop them. Collective."""
        for _, group, outer in self.by_group():
            outer.drop(group)
        self._sent.clear()

    def require_local(self, what: str) -> None:
        """Raise RuntimeError about ``what`` while anchors are in the place of the local weights."""
        if self.applied:
            raise RuntimeError(f"{what}: the anchors are in the place of the weights; leave replicas.anchors() first")

    def require_rest(self, what: str) -> None:
        """Raise RuntimeError about ``what`` if each replica has weights of its own."""
        if not self.at_anchor:
            raise RuntimeError(
                f"{what}: each replica has weights of its own between meetings; do it before the first step, or after "
                "zero.replicas.meet()"
            )

    def require_same_layout(self, moving: bool) -> None:
        """Raise RuntimeError if parameters would move to other buffers while anchors have the old layout."""
        if moving and self._outer:
            raise RuntimeError(
                "optimizer: it needs a new layout, and the anchors of replicas have the old one; make it before the "
                "first step"
            )

    # -- the step -----------------------------------------------------------------------------------------------

    def step(self, *, taken: bool = True) -> list[Meeting]:
        """Count one more step of all optimizers together, and meet if it is due. Collective.

        Call it after each step of the optimizer, even one that a `GradScaler` has skipped, but not after each backward.

        Args:
            taken: False if this replica skipped its update; even then this must be called.

        Returns:
            The meetings of the fragments whose differences were applied now; usually none.

        Raises:
            RuntimeError: a difference has NaN/Inf, on every rank; or inside `anchors` or `Zero.full_params`.
        """
        self.require_local("replicas.step")
        self._runtime.require_unpinned("replicas.step")
        self.order.ends((group for _, group in self.groups()), taken=taken)
        self.begin_anchors()  # for a replica whose first step was skipped
        self.num_steps += 1
        if not taken:
            self._mark_stale(group for _, group in self.groups())
        met = self._take_in([each for each in self._sent if self._due(each) <= self.num_steps])
        self.left = leaving = self.settings.leaving(self.num_steps)
        if leaving:
            met += self._take_in([each for each in leaving if each in self._sent])  # sent in a run with another `every`
            self._send(leaving)
            if not self.settings.overlap_steps:
                met += self._take_in(leaving)
                self.at_anchor = self.settings.fragments == 1
        return met

    def meet(self) -> list[Meeting]:
        """Have all fragments meet now, without overlap, as at the end of training. Collective.

        Differences in flight are applied first. Afterwards every replica has the same weights, the anchors.
        """
        self.require_local("replicas.meet")
        self._runtime.require_unpinned("replicas.meet")
        met = self._take_in(list(self._sent))
        everything = list(range(self.settings.fragments))
        self._send(everything)
        met += self._take_in(everything, stays=0.0)
        self.at_anchor = True
        return met

    def meets(self, num_steps: int) -> bool:
        """Whether replicas communicate once ``num_steps`` steps are done: differences are sent or applied."""
        settings = self.settings
        return bool(settings.leaving(num_steps)) or self.takes_in(num_steps)

    def takes_in(self, num_steps: int) -> bool:
        """Whether differences are due once ``num_steps`` steps are done: `step` waits for them and applies them."""
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
        """Issue the remaining collectives of these fragments' differences, None: of all in flight. Collective.

        Only a block format has a second collective; it is issued here at the latest. `Outer.difference` waits for it.
        """
        for fragment in list(self._sent) if fragments is None else fragments:
            for group, outer in self._in(fragment):
                outer.issue_gather(group)

    def _norms(self, fragments: list[int]) -> list[float]:
        """The norm of each fragment's mean difference, over a replica's ranks. Collective."""
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
            torch.autograd.graph.increment_version(group.params.params)  # backward through an old graph raises
            group.params.mark_stale()

    # -- anchors ------------------------------------------------------------------------------------------------

    @contextmanager
    def anchors(self) -> Generator[None]:
        """In this block the model computes with the anchors, the same on every replica: evaluate them. Collective.

        If local weights are the anchors already, they stay. Else this rank keeps a copy of its local master weights.
        Gradients of this block may be read, but no optimizer steps by them.
        """
        self.require_local("anchors")
        with nullcontext() if self.still_at_anchor() else self._shown():
            self._visit("the anchors")  # even if nothing was swapped: training in this block must raise at its step
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
        self._runtime.refresh_after_replacement("for now")
        try:
            yield
        finally:
            with torch.no_grad():
                for group, _, master in local:
                    group.params.master.copy_(master)
            self._runtime.refresh_after_replacement("back")

    def still_at_anchor(self) -> bool:
        """Whether local weights are still the anchors: no longer if any were written to since. Collective."""
        if not self.at_anchor:
            return False
        self._runtime.take_changes()
        written = any(not outer.is_shown(group) for _, group, outer in self.by_group())
        flag = torch.tensor([written], dtype=torch.uint8, device=self._world.control_device)
        with scope(CONTROL):
            self._world.all_reduce(flag, "max").wait()
        self.at_anchor = not flag.item()
        return self.at_anchor

    @property
    def num_bytes(self) -> int:
        """Bytes of anchors and momentum on this rank."""
        return sum(outer.num_bytes for outer in self._outer.values())

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """``(unit's name, tensor)`` of all resident tensors: anchors, momentum, differences in flight."""
        return [(unit.name, tensor) for (unit, _), outer in self._outer.items() for tensor in outer.tensors]

    def by_group(self) -> Iterator[tuple[tuple[Unit, int], FlatGroup, Outer]]:
        """Every group with its `Outer`, without the groups that were never trained: they have none."""
        for key, group in self.groups():
            if key in self._outer:
                yield key, group, self._outer[key]

    def loaded(self, num_steps: int, sent: dict[int, tuple[int, int]], *, at_anchor: bool) -> None:
        """Resume from a checkpoint, whose anchors are loaded already."""
        self.num_steps, self._sent, self.at_anchor = num_steps, sent, at_anchor
        self.order.forget()

    def outer_of(self, key: tuple[Unit, int], group: FlatGroup) -> Outer:
        """The `Outer` of a group; made at the first call."""
        if key not in self._outer:
            self._outer[key] = Outer(group, self.settings, self._world.rank)
        return self._outer[key]

    def fragment_of(self, unit: Unit) -> int:
        """The fragment that a unit is in."""
        return self.settings.fragment_of(self._runtime.all_units().index(unit))

    def left_at(self, fragment: int) -> int | None:
        """The number of steps done when the difference in flight was sent; None if none is in flight."""
        return self._sent[fragment][0] if fragment in self._sent else None

    def _due(self, fragment: int) -> int:
        dues = [outer.due for _, outer in self._under_way(fragment) if outer.due is not None]
        return max(dues, default=self.num_steps)

    def _in(self, fragment: int) -> list[tuple[FlatGroup, Outer]]:
        return [(group, outer) for (unit, _), group, outer in self.by_group() if self.fragment_of(unit) == fragment]

    def _under_way(self, fragment: int) -> list[tuple[FlatGroup, Outer]]:
        """The groups of a fragment with a difference in flight; others were first trained after it was sent."""
        return [(group, outer) for group, outer in self._in(fragment) if outer.due is not None]

    def groups(self) -> Iterator[tuple[tuple[Unit, int], FlatGroup]]:
        """``((unit, index in the unit), group)`` of every group of floating-point parameters."""
        for unit in self._runtime.all_units():
            for index, group in enumerate(unit.groups):
                if group.params.master.is_floating_point():
                    yield (unit, index), group
