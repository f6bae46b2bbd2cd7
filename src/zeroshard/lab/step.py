"""One training step as the engine would take it: what it computes, sends, waits for and holds, in order.

The events of a traced micro-batch (`zeroshard.lab.trace`) are told to a double of the engine that has no tensors. It
walks the engine's own schedule (`zeroshard.zero.schedule`) over the engine's own buffers (`zeroshard.zero.layout`), and
writes down what `zeroshard.zero.runtime`, `flat` and `reduction` would do at that event. From what it writes, memory is
a running sum and time a simulation (`zeroshard.lab.timeline`).

[Note: Many micro-batches]
    A backward ends with waiting for all that it sent, so micro-batches of a step follow each other with nothing under
    way between them. The first may refresh weights and the last may be the only one to reduce; those between them are
    alike, and one of them stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.lab.buffers import Buffer
from zeroshard.lab.memory import OptimizerState, state_bytes
from zeroshard.lab.trace import ROOT as ROOT_PLACE
from zeroshard.lab.trace import Span, Trace, Work
from zeroshard.lab.traffic import Accumulate, Message
from zeroshard.zero import MixedPrecision, ShardingStrategy
from zeroshard.zero.runtime import MAX_REDUCTIONS_IN_FLIGHT
from zeroshard.zero.schedule import ROOT, Cursor, Op, backward_ops, forward_ops
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
)
Phase = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Compute:
    """Operations, one after the other; ``unit``: during whose turn."""

    unit: str
    phase: Phase
    work: tuple[Work, ...]


@dataclass(frozen=True)
class Issue:
    """A collective is started, after what was computed before it; ``number`` names it.

    ``replicas``: among the ranks that hold the same shard. ``control``: a few bytes that all ranks must hear.
    """

    number: int
    message: Message
    unit: str
    phase: Phase
    replicas: bool = False
    control: bool = False


@dataclass(frozen=True)
class Wait:
    """Nothing is computed until that collective is done."""

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

    def messages(self) -> list[Message]:
        """The collectives of the step in order of issue, without control messages."""
        parts = [self.first, *[self.middle] * self.num_middle, self.last, self.update]
        return [a.message for part in parts for a in part if isinstance(a, Issue) and not a.control]


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


def step_of(
    trace: Trace,
    buffers: Sequence[Buffer],
    optimizer: OptimizerState,
    settings: Settings,
    whole_optimizer: OptimizerState | None = None,
) -> Step:
    """The step of one rank: the third one or a later one, when all states and buffers are there.

    Args:
        trace: of a micro-batch.
        buffers: of the model, root first, laid out for the ranks that shard together.
        optimizer: what it keeps.
        settings: of the engine.
        whole_optimizer: as `zeroshard.lab.memory.state_bytes` takes it.
    """
    engine = _Engine(trace, buffers, settings)

    def resident(num_reductions: int) -> dict[str, int]:
        return state_bytes(
            buffers,
            settings.strategy,
            settings.rank,
            optimizer,
            settings.precision,
            whole_optimizer=whole_optimizer,
            num_reductions=num_reductions,
            device_type=settings.device_type,
        )

    by_column: Accumulate = "sharded" if settings.strategy.grads is SHARD else "local"
    each_reduces = (settings.accumulate or by_column) == "sharded"
    before_update = resident(settings.num_micro if each_reduces else 1)
    engine.hold(before_update)
    num_taken = min(settings.num_micro, 3)
    parts = [engine.micro_batch(sync=each_reduces or micro == num_taken - 1) for micro in range(num_taken)]
    update = engine.update(optimizer)
    start = {**before_update, "grads": 0, "optimizer": 0}
    return Step(
        first=parts[0] if num_taken > 1 else [],
        middle=parts[1] if num_taken > 2 else [],
        num_middle=max(settings.num_micro - 2, 0),
        last=parts[-1],
        update=update,
        peak=engine.peak,
        start=start,
        before_update=before_update,
        after_update=before_update,
        tokens=trace.tokens * settings.num_micro,
    )


class _Double:
    """A `FlatGroup` without tensors: what of it is there, and what is under way."""

    def __init__(self, buffer: Buffer, engine: _Engine) -> None:
        settings, layout = engine.settings, buffer.layout
        precision = settings.precision
        self.buffer, self.engine = buffer, engine
        self.world_size = layout.world_size
        several = self.world_size > 1
        self.shard_params = settings.strategy.params is SHARD and several
        self.shard_optim = settings.strategy.optim is SHARD and several
        self.compute, self.master = precision.compute_dtype(buffer.dtype), buffer.dtype
        self.reduce = precision.gradient_dtype(buffer.dtype)
        self.full_bytes = layout.padded_numel * self.compute.itemsize
        self.seen_numel = layout.shard_numel if self.shard_optim else layout.padded_numel
        self.local_bytes = layout.padded_numel * self.reduce.itemsize
        self.reduced_bytes = self.seen_numel * self.master.itemsize
        # weights
        self.whole = not self.shard_params
        self.copy_due = self.compute != self.master and not settings.fused_copies
        self.stale = buffer.trained and self.whole and (self.shard_optim or self.copy_due)
        self.work: int | None = None
        # gradients; "view" of the local buffer, or memory of its "own"
        self.keep_local = settings.strategy.grads is not SHARD or not several
        self.has_local = False
        self.written: set[int] = set()
        self.reduced: Literal["view", "own"] | None = None
        self.arriving: Literal["view", "own"] | None = None
        self.grads_work: int | None = None
        self.across = False
        scale_by = self.world_size * settings.num_replicas
        self.scale_is_exact = scale_by & (scale_by - 1) == 0

    @property
    def name(self) -> str:
        return self.buffer.name

    # -- weights: `zeroshard.zero.flat` -----------------------------------------------------------------------

    def gather(self, *, again: bool = False) -> None:
        if self.work is not None or (self.whole and not self.stale and not again):
            return
        if not self.whole:
            self.whole = True
            self.engine.change("unit_buffers", self.full_bytes)
        self.stale = False
        copies = (self.copy_due or self.shard_params) and self.compute != self.master
        self.copy_due = False
        if copies:
            numel = self.seen_numel
            self.engine.compute(Work(0, numel * (self.compute.itemsize + self.master.itemsize), _name(self.compute)))
        if self.shard_optim:
            message = Message("all_gather", self.full_bytes, self.name, "weights", self.world_size)
            self.work = self.engine.issue(message)

    def wait(self) -> None:
        if self.work is not None:
            self.engine.wait(self.work)
            self.work = None

    def release(self) -> None:
        if not self.shard_params or not self.whole:
            return
        self.wait()
        self.whole = False
        self.engine.change("unit_buffers", -self.full_bytes)

    def after_update(self) -> None:
        """`mark_stale`, and no gradients."""
        self.release()
        self.copy_due = self.compute != self.master and not self.engine.settings.fused_copies
        self.stale = self.whole and (self.shard_optim or self.copy_due)

    # -- gradients: `zeroshard.zero.reduction` ----------------------------------------------------------------

    def accumulate(self, slot: int) -> None:
        self._vacate_local()
        self.have_local()
        numel = self.buffer.layout.slots[slot].numel
        grad_bytes, view_bytes = numel * self.compute.itemsize, numel * self.reduce.itemsize
        if slot in self.written and not self.scale_is_exact:
            cast = view_bytes if self.compute != self.reduce else 0
            self.engine.change("temporaries", cast + view_bytes)
            self.engine.change("temporaries", -cast - view_bytes)
        passes = grad_bytes + view_bytes * (2 if slot in self.written else 1)
        self.engine.compute(Work(0, passes, _name(self.reduce)))
        self.written.add(slot)

    def have_local(self) -> None:
        if not self.has_local:
            self.has_local = True
            self.engine.change("grads" if self.keep_local else "unit_buffers", self.local_bytes)

    def _vacate_local(self) -> None:
        if self.across:
            assert self.grads_work is not None
            self.engine.wait(self.grads_work)
            if self.arriving == "view":
                self.arriving = "own"
                self.engine.change("grads", self.seen_numel * self.reduce.itemsize)
            return
        self.settle()
        if self.reduced == "view" and self.keep_local and not self.written:
            self.reduced = "own"
            self.engine.change("grads", self.reduced_bytes)

    def start_reduction(self) -> None:
        self.reduce_across()
        self._vacate_local()
        self.have_local()
        self.written.clear()
        self.arriving = "view"
        if self.reduced is None and not self.keep_local and self.reduce == self.master:
            self.arriving = "own"
            self.engine.change("grads", self.reduced_bytes)
        self.grads_work = self._collective()
        self.across = self.engine.settings.num_replicas > 1

    def reduce_across(self) -> None:
        if not self.across:
            return
        assert self.grads_work is not None
        self.engine.wait(self.grads_work)
        num_bytes = self.buffer.layout.shard_numel * self.reduce.itemsize
        message = Message("all_reduce", num_bytes, self.name, "grads", self.engine.settings.num_replicas)
        self.grads_work = self.engine.issue(message, replicas=True)
        self.across = False

    def _collective(self) -> int:
        def message(op: str) -> Message:
            return Message(op, self.local_bytes, self.name, "grads", self.world_size)

        settings = self.engine.settings
        if settings.strategy.optim is SHARD:
            if self.world_size == 1 and settings.num_replicas > 1:
                return self.engine.nothing()
            return self.engine.issue(message("reduce_scatter"))
        if settings.uniform_order:
            return self.engine.issue(message("all_reduce"))
        self.engine.wait(self.engine.issue(message("reduce_scatter")))
        return self.engine.issue(message("all_gather"))

    def settle(self) -> None:
        if self.grads_work is None:
            return
        self.reduce_across()
        self.engine.wait(self.grads_work)
        arrived, self.grads_work, self.arriving = self.arriving, None, None
        arrived_bytes = self.seen_numel * self.reduce.itemsize
        if self.reduced is not None:
            self.engine.compute(Work(0, arrived_bytes + 2 * self.reduced_bytes, _name(self.master)))
            if arrived == "own":
                self.engine.change("grads", -arrived_bytes)
        elif self.reduce != self.master:
            self.engine.compute(Work(0, arrived_bytes + self.reduced_bytes, _name(self.master)))
            self.engine.change("grads", self.reduced_bytes)
            self.reduced = "own"
            if arrived == "own":
                self.engine.change("grads", -arrived_bytes)
        else:
            self.reduced = arrived
        if not self.keep_local and not self.written:
            if self.reduced == "view":
                self.reduced = "own"
                self.engine.change("grads", self.reduced_bytes)
            self._let_local_go()

    def _let_local_go(self) -> None:
        if self.has_local:
            self.has_local = False
            self.engine.change("unit_buffers", -self.local_bytes)

    def clear(self) -> None:
        if self.reduced == "own":
            self.engine.change("grads", -self.reduced_bytes)
        self.reduced = None


class _Unit:
    """`zeroshard.zero.unit.Unit`, of doubles."""

    def __init__(self, name: str, groups: list[_Double]) -> None:
        self.name, self.groups = name, groups
        self.trained = [group for group in groups if group.buffer.trained]
        self.calls = self.active = 0
        self.kept = self.held = self.used = False

    def gather(self, *, again: bool = False) -> None:
        for group in self.groups:
            group.gather(again=again)

    def wait(self) -> None:
        for group in self.groups:
            group.wait()

    def unshard(self) -> None:
        self.gather()
        self.wait()

    def release(self) -> None:
        for group in self.groups:
            group.release()


class _Engine:
    """`zeroshard.zero.runtime.Runtime`, of doubles; writes down its actions and its memory."""

    def __init__(self, trace: Trace, buffers: Sequence[Buffer], settings: Settings) -> None:
        self.trace, self.settings = trace, settings
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        self._live = 0
        self.peak = Moment(dict(self._bytes), "")
        self._actions: list[Action] = []
        self._number = 0
        self._place, self._phase = "root", "forward"
        by_name: dict[str, list[_Double]] = {"root": []}
        for buffer in buffers:
            by_name.setdefault(buffer.unit, []).append(_Double(buffer, self))
        self.root = _Unit("root", by_name.pop("root"))
        unknown = set(by_name) - set(trace.units)
        assert not unknown, f"units that the trace does not know: {unknown}"
        self.units = [_Unit(name, by_name[name]) for name in trace.units if name in by_name]
        several = any(buffer.layout.world_size > 1 for buffer in buffers)
        self.shard_params = settings.strategy.params is SHARD and several
        self.shard_grads = settings.strategy.grads is SHARD and several
        self.reshard_after_forward = settings.strategy.reshard_after_forward
        self._slots = {
            slot.name: (group, index)
            for unit in self.all_units()
            for group in unit.groups
            for index, slot in enumerate(group.buffer.layout.slots)
        }
        self._in_flight: deque[_Unit] = deque()
        self._to_replicas: deque[_Unit] = deque()
        self._cursor: Cursor | None = None

    def all_units(self) -> list[_Unit]:
        return [self.root, *self.units]

    # -- what is written down ---------------------------------------------------------------------------------

    def hold(self, resident: dict[str, int]) -> None:
        """Have what outlives a step; reduced gradients come by themselves."""
        for category in ("params", "master", "optimizer"):
            self.change(category, resident[category])
        for unit in self.all_units():
            for group in unit.trained:
                if group.keep_local:
                    group.have_local()
        self.change("activations", self.trace.input_bytes)

    def change(self, category: str, num_bytes: int) -> None:
        self._bytes[category] += num_bytes
        self._live += num_bytes
        if self._live > self.peak.total:
            self._note_peak()

    def _note_peak(self, kept: int = 0, temporary: int = 0) -> None:
        found = dict(self._bytes)
        found["activations"] += kept
        found["temporaries"] += temporary
        ahead = sum(
            group.full_bytes
            for unit in self.units
            for group in unit.groups
            if group.shard_params and group.whole and not unit.used
        )
        found["unit_buffers"] -= ahead
        found["prefetch"] += ahead
        self.peak = Moment(found, f"{self._phase} of {self._place}")

    def compute(self, *work: Work) -> None:
        if work:
            self._actions.append(Compute(self._place, self._phase, work))

    def issue(self, message: Message, *, replicas: bool = False, control: bool = False) -> int:
        self._number += 1
        self._actions.append(Issue(self._number, message, self._place, self._phase, replicas, control))
        return self._number

    def nothing(self) -> int:
        """A collective of one rank."""
        self._number += 1
        return self._number

    def wait(self, number: int) -> None:
        self._actions.append(Wait(number, self._place, self._phase))

    def _span(self, span: Span) -> None:
        if self._live + span.peak_kept + span.peak_temporary > self.peak.total:
            self._note_peak(span.peak_kept, span.peak_temporary)
        self._bytes["activations"] += span.kept
        self._bytes["temporaries"] += span.temporary
        self._live += span.kept + span.temporary
        self.compute(*span.work)

    # -- a micro-batch ----------------------------------------------------------------------------------------

    def micro_batch(self, *, sync: bool) -> list[Action]:
        """Forward and backward; returns its actions."""
        self._actions = []
        self._sync = sync
        self._ran: set[_Unit] = set()
        for span in self.trace.spans:
            event = span.event
            unit = self.root if event.unit == ROOT_PLACE else self.units[event.unit]
            self._place = unit.name
            if event.name == "forward_begins":
                self._phase = "forward"
                self._forward_begins(unit, event.unit)
            elif event.name == "forward_ends":
                self._forward_ends(unit, grads_flow=event.grads_flow, keep=event.keep)
            elif event.name == "runs_again":
                if unit.calls == 0:
                    self._walk_before(unit)
                unit.unshard()
            elif event.name == "backward_begins":
                self._phase = "backward"
                self._backward_begins(unit)
            elif event.name == "grad":
                self._backward()
                name = event.param if unit is self.root else f"{unit.name}.{event.param}"
                double, slot = self._slots[name]
                double.accumulate(slot)
            elif event.name == "backward_ends":
                self._backward_ends(unit)
            elif event.name == "backward_over":
                self._place = "root"
                self._end_backward()
            self._span(span)
        return self._actions

    def _forward_begins(self, unit: _Unit, place: int) -> None:
        last = len(self.units) - 1
        if unit is self.root:
            self._frees_after_forward = self.reshard_after_forward
            self.root.gather()
            if self.shard_params:
                self._forward = Cursor(forward_ops(len(self.units)), lambda op: self.units[op.place].gather())
                self._forward.through(Op("gather", min(self.settings.prefetch, len(self.units)) - 1))
            else:
                for other in self.units:
                    other.gather()
        else:
            self._ran.add(unit)
            if self.shard_params:
                self._forward.through(Op("gather", min(place + self.settings.prefetch, last)))
        unit.used = True
        unit.unshard()

    def _forward_ends(self, unit: _Unit, *, grads_flow: bool, keep: bool) -> None:
        unit.kept |= keep
        unit.calls += grads_flow
        if unit is self.root:
            if self.shard_params:
                self._forward.finish()
            for other in self.units:
                if other not in self._ran:
                    other.wait()
                    if self._frees_after_forward:
                        other.release()
            return
        unit.used = False
        if not keep and self._frees_after_forward:
            unit.release()

    def _backward_begins(self, unit: _Unit) -> None:
        self._backward()
        if unit is not self.root:
            unit.calls = max(unit.calls - 1, 0)
            unit.active += 1
            if unit.calls == 0:
                self._walk_before(unit)
        unit.used = True
        unit.unshard()

    def _backward(self) -> Cursor:
        if self._cursor is None:
            ops = backward_ops(len(self.units), prefetch=self.settings.prefetch, gather=self.shard_params)
            self._cursor = Cursor(ops, self._run)
            for unit in self.units:
                if self.shard_params and (self.root.calls > 1 or unit.calls > 1):
                    unit.gather()
                    unit.held = True
        return self._cursor

    def _run(self, op: Op) -> None:
        unit = self.root if op.place == ROOT else self.units[op.place]
        if op.action == "gather":
            unit.gather(again=unit.kept and self.reshard_after_forward)
        else:
            self._reduce(unit)

    def _walk_before(self, unit: _Unit) -> None:
        self._backward().before(Op("reduce", self.units.index(unit)))

    def _backward_ends(self, unit: _Unit) -> None:
        cursor = self._backward()
        unit.active = max(unit.active - 1, 0)
        if unit is self.root or unit.active:
            return
        unit.used = False
        if unit.calls == 0:
            cursor.through(Op("reduce", self.units.index(unit)))
            if not unit.kept:
                unit.release()

    def _reduce(self, unit: _Unit) -> None:
        if self._sync:
            for group in unit.trained:
                group.start_reduction()
            self._reduce_across()
            self._to_replicas.append(unit)
            if self.shard_grads:
                self._in_flight.append(unit)
                while len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                    for group in self._in_flight.popleft().groups:
                        group.settle()
        if unit is not self.root and not unit.active and not unit.kept and not (unit.held and unit.calls):
            unit.used = False
            unit.release()

    def _reduce_across(self) -> None:
        while self._to_replicas:
            for group in self._to_replicas.popleft().groups:
                group.reduce_across()

    def _end_backward(self) -> None:
        self._backward().finish()
        if self._sync:
            self._reduce_across()
            self._control("all_reduce", sum(len(g.buffer.layout.slots) for u in self.all_units() for g in u.trained))
            for unit in self.all_units():
                for group in unit.trained:
                    group.reduce_across()
            for unit in self.all_units():
                for group in unit.trained:
                    group.settle()
            self._in_flight.clear()
        for unit in self.all_units():
            unit.release()
            unit.calls = unit.active = 0
            unit.kept = unit.held = unit.used = False
        self._cursor = None

    def _control(self, op: str, num_bytes: int, *, shard: bool = False) -> None:
        world_size = max(group.world_size for unit in self.all_units() for group in unit.groups)
        world_size *= 1 if shard else self.settings.num_replicas
        if world_size > 1:
            self.wait(self.issue(Message(op, num_bytes, "control", "control", world_size), control=True))

    # -- the update -------------------------------------------------------------------------------------------

    def update(self, optimizer: OptimizerState) -> list[Action]:
        """The norm, clipping, the optimizer's step and the end of gradients; returns its actions."""
        self._actions = []
        self._place, self._phase = "root", "optimizer"
        trained = [group for unit in self.all_units() for group in unit.trained]
        if self.settings.clips:
            self.compute(*(Work(0, group.reduced_bytes, _name(group.master)) for group in trained))
            if any(group.shard_optim for group in trained):
                self._control("all_gather", 8 * trained[0].world_size, shard=True)
        if self.settings.clips and not self.settings.fused_copies:  # gradients are scaled in a pass of its own
            self.compute(*(Work(0, 2 * group.reduced_bytes, _name(group.master)) for group in trained))
        # It reads gradient, master and states, and writes all but the gradient.
        passes = 1 + 2 * (1 + optimizer.num_per_element)
        for group in trained:
            num_bytes = passes * group.reduced_bytes
            num_bytes += self.settings.fused_copies * group.seen_numel * group.compute.itemsize
            self.compute(Work(0, num_bytes, _name(group.master)))
        for group in trained:
            group.clear()
            group.after_update()
        return self._actions


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
