"""One training step as the engine would take it: what it computes, sends, waits for and holds, in order.

The events of a traced micro-batch (`zeroshard.lab.predict.trace`) are told to a double of the engine that has no
tensors. It walks the engine's own schedule (`zeroshard.zero.runtime.schedule`) over the engine's own buffers
(`zeroshard.zero.buffers.layout`), and writes down what `zeroshard.zero.runtime.runtime`, `flat_params` and `flat_grads`
would do at that event. From what it writes, memory is a running sum and time a simulation
(`zeroshard.lab.predict.timeline`).

[Note: Many micro-batches]
    A backward ends with waiting for all that it sent, so micro-batches of a step follow each other with nothing under
    way between them. The first may refresh weights and the last may be the only one to reduce; those between them are
    alike, and one of them stands for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from zeroshard.lab.predict.actions import CATEGORIES, Action, Compute, Issue, Moment, Phase, Settings, Step, Wait
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.doubles import GroupDouble, UnitDouble
from zeroshard.lab.predict.memory import OptimizerState, state_bytes
from zeroshard.lab.predict.spans import ROOT as ROOT_PLACE
from zeroshard.lab.predict.spans import Span, Trace
from zeroshard.lab.predict.traffic import Accumulate, Message
from zeroshard.lab.predict.work import Work, dtype_name
from zeroshard.zero.runtime.reductions import MAX_REDUCTIONS_IN_FLIGHT
from zeroshard.zero.runtime.schedule import ROOT, Cursor, Op, backward_ops, forward_ops
from zeroshard.zero.strategy import SHARD

__all__ = ["Settings", "Step", "step_of"]


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
        whole_optimizer: as `zeroshard.lab.predict.memory.state_bytes` takes it.
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


class _Engine:
    """`zeroshard.zero.runtime.runtime.Runtime`, of doubles; writes down its actions and its memory."""

    def __init__(self, trace: Trace, buffers: Sequence[Buffer], settings: Settings) -> None:
        self.trace, self.settings = trace, settings
        self._bytes = dict.fromkeys(CATEGORIES, 0)
        self._live = 0
        self.peak = Moment(dict(self._bytes), "")
        self._actions: list[Action] = []
        self._number = 0
        self._place = "root"
        self._phase: Phase = "forward"
        by_name: dict[str, list[GroupDouble]] = {"root": []}
        for buffer in buffers:
            by_name.setdefault(buffer.unit, []).append(GroupDouble(buffer, self))
        self.root = UnitDouble("root", by_name.pop("root"))
        unknown = set(by_name) - set(trace.units)
        assert not unknown, f"units that the trace does not know: {unknown}"
        self.units = [UnitDouble(name, by_name[name]) for name in trace.units if name in by_name]
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
        self._in_flight: deque[UnitDouble] = deque()
        self._to_replicas: deque[UnitDouble] = deque()
        self._cursor: Cursor | None = None

    def all_units(self) -> list[UnitDouble]:
        return [self.root, *self.units]

    # -- what is written down ---------------------------------------------------------------------------------

    def hold(self, resident: dict[str, int]) -> None:
        """Have what outlives a step; gradients come by themselves."""
        for category in ("params", "master", "optimizer"):
            self.change(category, resident[category])
        self.change("others", self.trace.input_bytes)

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
        self._ran: set[UnitDouble] = set()
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

    def _forward_begins(self, unit: UnitDouble, place: int) -> None:
        last = len(self.units) - 1
        if unit is self.root:
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

    def _forward_ends(self, unit: UnitDouble, *, grads_flow: bool, keep: bool) -> None:
        unit.kept |= keep
        unit.calls += grads_flow
        if unit is self.root:
            if self.shard_params:
                self._forward.finish()
            for other in self.units:
                if other not in self._ran:
                    other.wait()
                    self._free_after_forward(other)
            return
        unit.used = False
        if not keep:
            self._free_after_forward(unit)

    def _free_after_forward(self, unit: UnitDouble) -> None:
        if self.reshard_after_forward and unit is not self.units[-1]:
            unit.release()

    def _backward_begins(self, unit: UnitDouble) -> None:
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
            unit.gather(again=unit.kept and self.reshard_after_forward and unit is not self.units[-1])
        else:
            self._reduce(unit)

    def _walk_before(self, unit: UnitDouble) -> None:
        self._backward().before(Op("reduce", self.units.index(unit)))

    def _backward_ends(self, unit: UnitDouble) -> None:
        cursor = self._backward()
        unit.active = max(unit.active - 1, 0)
        if unit is self.root or unit.active:
            return
        unit.used = False
        if unit.calls == 0:
            cursor.through(Op("reduce", self.units.index(unit)))
            if not unit.kept:
                unit.release()

    def _reduce(self, unit: UnitDouble) -> None:
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
        if self.settings.agrees:
            self._control("all_reduce", 24)
        if self.settings.clips:
            self.compute(*(Work(0, group.reduced_bytes, dtype_name(group.master)) for group in trained))
            if any(group.shard_optim for group in trained):
                self._control("all_gather", 8 * trained[0].world_size, shard=True)
        if self.settings.clips and not self.settings.fused_copies:  # gradients are scaled in a pass of its own
            self.compute(*(Work(0, 2 * group.reduced_bytes, dtype_name(group.master)) for group in trained))
        # It reads gradient, master and states, and writes all but the gradient.
        passes = 1 + 2 * (1 + optimizer.num_per_element)
        for group in trained:
            num_bytes = passes * group.reduced_bytes
            num_bytes += self.settings.fused_copies * group.seen_numel * group.compute.itemsize
            self.compute(Work(0, num_bytes, dtype_name(group.master)))
        for group in trained:
            group.clear()
            group.after_update()
        return self._actions
