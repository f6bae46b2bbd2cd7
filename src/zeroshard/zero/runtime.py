"""The engine at work: it hears of each event of forward and backward and moves weights and gradients.

A forward pass begins when the model is called. Weights that the last step made stale are refreshed in one order on
every rank; sharded ones are gathered `prefetch` units ahead of their use and freed after it. A backward pass begins
with the first gradient that reaches an output and ends when autograd is done. In between, units are gathered and
reduced along the schedule (`zeroshard.zero.schedule`).

[Note: Order of execution]
    Places in the schedule are those of the first forward on rank 0, told to the others at the first backward. If the
    model later runs in another order, every result is still right: weights that were freed too early are gathered
    again, gradients that come after their unit was reduced are reduced once more at the end. It only costs traffic.

[Note: The turn]
    What runs last in forward is needed first in backward. So the weights of the order's last unit stay in between, on
    every rank, whether it ran there or not: one gather less, and the one that nothing could have hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, scope
from zeroshard.zero.backward_pass import BackwardPass, Run
from zeroshard.zero.grad_hooks import GradHooks
from zeroshard.zero.hooks import in_backward
from zeroshard.zero.levels import Levels
from zeroshard.zero.schedule import ROOT, Cursor, Op, backward_ops, forward_ops
from zeroshard.zero.strategy import SHARD, ShardingStrategy
from zeroshard.zero.unit import FlatGroup, Unit

MAX_REDUCTIONS_IN_FLIGHT = 2


class Runtime:
    """The listener behind the hooks.

    Attributes:
        comm: all ranks.
        root, units: the root unit, and the others in order of registration.
        sync: whether backward passes reduce; False inside `no_sync`.
        unreduced: whether the last backward pass left gradients on this rank that no reduction has seen.
        backward_pass: the one that is running.
    """

    def __init__(
        self, root: Unit, units: list[Unit], levels: Levels, strategy: ShardingStrategy, prefetch: int
    ) -> None:
        self.root = root
        self.units = units
        self.levels, self.comm = levels, levels.world
        self.prefetch = prefetch
        self._read_row(strategy)
        self.sync = True
        self.unreduced = False
        self.backward_pass: BackwardPass | None = None
        self._pinned = False
        self._graph_of_graph = False  # whether a backward in this step has made one, which reads weights unannounced
        self._order = list(units)
        self._order_agreed = False
        self._ran: dict[Unit, None] = {}  # in order of the first call in this forward
        self._passed = 0
        self._frees_after_forward = True
        self._at_the_turn: Unit | None = None  # whose weights stay until its backward: [Note: The turn]
        self._forward = Cursor([], lambda op: None)
        self._in_flight: deque[Unit] = deque()
        self._to_replicas: deque[Unit] = deque()  # reduced within this rank's group so far
        self._grad_hooks = GradHooks(self)
        self._grad_hooks.attach(self.all_units())

    def all_units(self) -> list[Unit]:
        """The root unit, then the others."""
        return [self.root, *self.units]

    def groups(self) -> Iterator[FlatGroup]:
        """Every flat group, unit by unit."""
        for unit in self.all_units():
            yield from unit.groups

    # -- forward ----------------------------------------------------------------------------------------------

    def forward_begins(self, unit: Unit) -> None:
        """Have the unit's weights whole and current, and the next ones on their way."""
        if unit is self.root and not in_backward():
            self._begin_forward()
        elif unit is not self.root and not in_backward():
            place = self._order.index(unit)
            self._ran.setdefault(unit)
            self._forward.through(Op("gather", min(place + self.prefetch, len(self._order) - 1)))
            for skipped in self._order[self._passed : place]:
                if skipped not in self._ran:
                    self._free_after_forward(skipped)
            self._passed = max(self._passed, place)
        elif unit is not self.root and self.backward_pass is not None and unit.calls == 0:
            # Computed again, perhaps before its backward begins, and others may have gathered later units first.
            self._walk_before_reduction(unit, self.backward_pass)
        unit.unshard()

    def _begin_forward(self) -> None:
        if self.backward_pass is not None:
            self._forget_backward()  # an exception ended it
        self._grad_hooks.attach_trained()
        self._ran = {}
        self._passed = 0
        # One answer for all units, run or skipped: what is whole must be so on every rank.
        self._frees_after_forward = self.reshard_after_forward or not torch.is_grad_enabled()
        self._at_the_turn = self._order[-1] if self._order and torch.is_grad_enabled() else None
        self.root.gather()
        if self.shard_params:
            self._forward = Cursor(forward_ops(len(self._order)), lambda op: self._order[op.place].gather())
            self._forward.through(Op("gather", min(self.prefetch, len(self._order)) - 1))
        else:
            for unit in self._order:
                unit.gather()

    def forward_ends(self, unit: Unit, *, grads_flow: bool, keep: bool) -> None:
        """Free the unit's weights, unless backward needs them at once."""
        unit.kept |= keep
        unit.calls += grads_flow
        if unit is self.root:
            self._forward.finish()
            for other in self._order:
                if other not in self._ran:
                    other.wait()  # nobody else does, and only then may its weights be gathered anew
                    self._free_after_forward(other)
            if not grads_flow and not keep:
                self._reshard(unit)
            return
        if not keep:
            self._free_after_forward(unit)

    def _free_after_forward(self, unit: Unit) -> None:
        if self._frees_after_forward and unit is not self._at_the_turn:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        again = self._graph_of_graph or (self.backward_pass is not None and self.backward_pass.creates_graph)
        if self.shard_params and not self._pinned and not again:
            unit.reshard()

    # -- backward ---------------------------------------------------------------------------------------------

    def backward_begins(self, unit: Unit) -> None:
        """Walk the schedule to where this unit's weights are whole; see [Note: Which call] in `hooks`."""
        backward = self._backward()
        if unit is self.root:
            unit.unshard()  # a forward without gradients may have come in between and freed them
            return
        unit.calls = max(unit.calls - 1, 0)
        unit.active += 1
        if unit.calls == 0:
            self._walk_before_reduction(unit, backward)
        unit.unshard()

    def _walk_before_reduction(self, unit: Unit, backward: BackwardPass) -> None:
        if unit in backward.place:
            backward.cursor.before(Op("reduce", backward.place[unit]))

    def backward_ends(self, unit: Unit) -> None:
        """Reduce the unit's gradients, if no other call of it is still to come."""
        backward = self._backward()
        unit.active = max(unit.active - 1, 0)
        if unit is self.root or unit.active:
            return
        if unit.calls == 0 and unit in backward.place:
            backward.cursor.through(Op("reduce", backward.place[unit]))
        if unit.calls == 0 and not unit.kept:
            self._reshard(unit)

    def _backward(self) -> BackwardPass:
        """The pass that is running, begun if need be."""
        if self.backward_pass is not None and self.backward_pass.failed:
            self._forget_backward()
        if self.backward_pass is None:
            self._agree_on_order()
            # Frozen units too: gradients may flow through them on one rank alone.
            units = list(self._order)

            def take(op: Op) -> None:
                unit = self.root if op.place == ROOT else units[op.place]
                if op.action == "gather":
                    others_may_have_freed_it = self.reshard_after_forward and unit is not self._at_the_turn
                    unit.gather(again=unit.kept and others_may_have_freed_it)
                else:
                    self._reduce(unit)

            ops = backward_ops(len(units), prefetch=self.prefetch, gather=self.shard_params)
            run = Run()
            self.backward_pass = BackwardPass(units, Cursor(ops, take), run)
            self._hold_what_runs_again(units)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._end_backward, run))
        return self.backward_pass

    def _hold_what_runs_again(self, units: list[Unit]) -> None:
        """Gather what has several calls to come now, and keep it: its turns have no place in the schedule."""
        several_forwards = self.root.calls > 1
        for unit in units:
            if self.shard_params and (several_forwards or unit.calls > 1):
                unit.gather()
                unit.held = True

    def forget_calls(self) -> None:
        """Whatever forwards were run, no backward of theirs is expected any more."""
        self._graph_of_graph = False
        for unit in self.all_units():
            unit.calls = 0

    def _reduce(self, unit: Unit) -> None:
        if self.sync:
            unit.reduce_grads()
            self._reduce_across()  # those before it: meanwhile their first sum has come
            self._to_replicas.append(unit)
            if self.shard_grads:
                self._in_flight.append(unit)
                while len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                    self._in_flight.popleft().settle()
        if unit is not self.root and not unit.active and not unit.kept and not (unit.held and unit.calls):
            self._reshard(unit)

    def _reduce_across(self) -> None:
        while self._to_replicas:
            self._to_replicas.popleft().reduce_across()

    def _end_backward(self, run: Run) -> None:
        backward = self.backward_pass
        assert backward is not None
        backward.cursor.finish()
        self._graph_of_graph |= backward.creates_graph
        if self.sync:
            self._settle()
        self.unreduced = not self.sync
        for unit in self.all_units():
            self._reshard(unit)
            for group in unit.groups:
                group.awaited = not self.sync and (group.trained or group.awaited)
                if group.grads.reduced is not None:
                    group.expose_grads()
        self._forget_backward()

    def _settle(self) -> None:
        """Agree on which parameters had gradients anywhere, reduce what came late, wait for the reductions."""
        self._reduce_across()
        units = [unit for unit in self.all_units() if unit.trained_groups()]
        groups = [group for unit in units for group in unit.trained_groups()]
        late = [any(group.grads.pending for group in unit.groups) for unit in units]
        flags = [flag for group in groups for flag in group.grads.used] + late
        if self.comm.world_size > 1 and flags:
            agreed = torch.tensor(flags, dtype=torch.uint8, device=self.comm.control_device)
            with scope(CONTROL):
                self.comm.all_reduce(agreed, "max").wait()
            flags = [bool(flag) for flag in agreed.tolist()]
        start = 0
        for group in groups:
            stop = start + len(group.grads.used)
            group.grads.used = flags[start:stop]
            start = stop
        for unit, is_late in zip(units, flags[start:], strict=True):
            if is_late:
                unit.reduce_grads()
        for unit in units:
            unit.reduce_across()
        for unit in units:
            unit.settle()
        self._in_flight.clear()

    def _forget_backward(self) -> None:
        self.backward_pass = None
        for unit in self.all_units():
            unit.calls = unit.active = 0
            unit.kept = unit.held = False

    def _agree_on_order(self) -> None:
        if self._order_agreed or not self.units:
            return
        recorded = list(self._ran)
        for place, unit in enumerate(self.units):
            if unit not in self._ran:  # another rank may run it: where it was registered, then
                recorded.insert(recorded.index(self.units[place - 1]) + 1 if place else 0, unit)
        if self.comm.world_size > 1:
            places = [self.units.index(unit) for unit in recorded]
            message = torch.tensor(places, dtype=torch.int64, device=self.comm.control_device)
            with scope(CONTROL):
                self.comm.broadcast(message, src=0).wait()
            recorded = [self.units[place] for place in message.tolist()]
        self._order = recorded
        self._order_agreed = True

    # -- gradients --------------------------------------------------------------------------------------------

    def take_grad(self, group: FlatGroup, slot: int, grad: Tensor) -> None:
        """A parameter's gradient is there."""
        self._backward()
        group.grads.accumulate(slot, grad)

    def require_reduced(self, what: str) -> None:
        """Raise RuntimeError if gradients wait for a reduction that never came."""
        if self.backward_pass is not None and self.backward_pass.failed:
            raise RuntimeError(
                f"{what}: the last backward ended in an exception, and its gradients are incomplete; "
                "call zero_grad() and take the step again"
            )
        if self.unreduced:
            raise RuntimeError(
                f"{what}: gradients accumulated under no_sync() were never reduced; "
                "run the last backward of a step outside no_sync()"
            )

    def clear_grads(self, params: set[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Forget the gradients of ``params``, None: all; or have them be zero."""
        if params is None and self.backward_pass is not None and self.backward_pass.failed:
            self._forget_backward()
        for group in self.groups():
            chosen = {i for i, p in enumerate(group.params.params) if params is None or p in params}
            if chosen and not set_to_none:
                group.grads.zero(chosen)
            elif chosen:
                group.awaited = group.awaited and len(chosen) < len(group.params.params)
                group.grads.clear(chosen)
                for piece, shard in zip(group.params.pieces, group.shards, strict=True):
                    if piece.slot in chosen:
                        shard.grad = None
        self.unreduced = self.unreduced and any(group.grads.pending for group in self.groups())

    # -- layout -----------------------------------------------------------------------------------------------

    def groups_to_leave(self, params: set[nn.Parameter]) -> list[FlatGroup]:
        """The groups of ``params`` that do not keep tensors whole."""
        return [group for group in self.groups() if not group.whole and not params.isdisjoint(group.params.params)]

    def keep_whole(self, params: set[nn.Parameter]) -> None:
        """Lay ``params`` out so that each tensor has one owner; see [Note: Laid out anew] in `unit`. Collective.

        Raises:
            RuntimeError: inside `pinned`, or while gradients of these parameters or their neighbours wait for a step.
        """
        leaving = self.groups_to_leave(params)
        if self._pinned:
            raise RuntimeError("optimizer: it lays weights out anew; make it outside full_params()")
        if self.unreduced or any(any(group.grads.used) for group in leaving):
            raise RuntimeError(
                "optimizer: gradients wait for a step, and would be lost where weights are laid out anew; "
                "make it before backward, or after zero_grad()"
            )
        loads = [0] * self.levels.shard.world_size
        for unit in self.all_units():
            unit.keep_whole(params, loads)
        # A graph from before holds the old buffers: autograd shall say so if a backward goes through it.
        torch.autograd.graph.increment_version([param for group in leaving for param in group.params.params])
        self._grad_hooks.attach(self.all_units())

    def require_unpinned(self, what: str) -> None:
        """Raise RuntimeError inside `pinned`, which promises weights that are whole and current."""
        if self._pinned:
            raise RuntimeError(f"{what}: it changes weights; call it outside full_params()")

    def require_rest(self, what: str) -> None:
        """Raise RuntimeError inside `pinned`, or while gradients wait for a step."""
        if self._pinned:
            raise RuntimeError(f"{what}: it lays weights out anew; call it outside full_params()")
        if self.unreduced or any(any(group.grads.used) for group in self.groups()):
            raise RuntimeError(f"{what}: gradients wait for a step, and would be lost; call it after zero_grad()")

    def take_row(self, strategy: ShardingStrategy) -> None:
        """Move weights and gradients as this row says from now on; the groups are laid out by it already."""
        self._read_row(strategy)
        self.forget_calls()
        # A graph from before holds the old buffers: autograd shall say so if a backward goes through it.
        torch.autograd.graph.increment_version([param for group in self.groups() for param in group.params.params])
        self._grad_hooks.attach(self.all_units())

    def _read_row(self, strategy: ShardingStrategy) -> None:
        several = self.levels.shard.world_size > 1
        self.shard_params = strategy.params is SHARD and several
        self.shard_grads = strategy.grads is SHARD and several
        self.reshard_after_forward = strategy.reshard_after_forward

    # -- whole weights ----------------------------------------------------------------------------------------

    @contextmanager
    def pinned(self) -> Generator[None]:
        """Keep all weights whole and current in this block. Collective on entry."""
        if self._pinned:
            yield
            return
        for unit in self.all_units():
            unit.gather()
        for unit in self.all_units():
            unit.wait()
        self._pinned = True
        try:
            yield
        finally:
            self._pinned = False
            for unit in self.all_units():
                self._reshard(unit)

    def masters_replaced(self) -> None:
        """Masters have got other values, outside of a step. Collective.

        Whole weights follow at once, in one order on every rank: `pinned` shows them, and a backward whose forward is
        over would ask for those alone that this rank runs.
        """
        for group in self.groups():
            group.params.mark_stale()
            if group.params.stale or self._pinned:
                group.params.gather()
        for unit in self.all_units():
            unit.wait()

    @property
    def weights_readable(self) -> bool:
        """Whether the module's parameters show current, whole weights now."""
        return all(unit.readable for unit in self.all_units())

    def detach(self) -> None:
        """Remove the hooks on parameters."""
        self._grad_hooks.detach()
