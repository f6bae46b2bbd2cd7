"""The forward and the backward of a step: at each event of a unit, what is unsharded, resharded and reduced.

[Note: Order of execution]
    The schedule has the units in one order on every rank: rank 0's of the first forward. A rank may skip units, or call
    each of them once in another order: weights stay unsharded until they are used, and gradients that arrive after
    their unit was reduced are reduced once more. A unit that is called again after it was freed is gathered on the
    spot, so on every rank.

[Note: The turn]
    Backward begins with the unit that forward ended with. So every rank keeps the weights of the last unit of the order
    unsharded between the two, whether it called the unit or not: no computation could overlap with gathering them.

[Note: One piece]
    In a world of one rank whose state is on the device nothing is sent, freed or awaited at a unit's call: the root's
    forward makes all weights current, and the end of its backward reduces all gradients. Units then have no hooks, so a
    compiled model is one graph.

[Note: Ahead of a gather]
    A reduction in flight keeps its unit's local gradients in memory. Where weights are gathered one unit ahead,
    collectives are issued in this order (`schedule`)::

        reduce 3, gather 1 | backward of 2 | reduce 2, gather 0 | backward of 1 | ...

    Backward of 1 waits for ``gather 1``, and collectives among the same ranks run in the order in which they were
    issued, so ``reduce 3`` is done by then too. To wait for it just before ``gather 0`` is issued costs no time:
    ``gather 1`` and ``reduce 2`` are still queued. It frees a buffer before that gather allocates one, and one
    reduction is in flight while a unit's gradients are computed. Where nothing is gathered in between there are up to
    `MAX_REDUCTIONS_IN_FLIGHT`.

[Note: Behind]
    If a unit's state is off a GPU, the host waits for its update before it issues its gather. One unit ahead, that
    would keep back the forward of the unit before, which the device could compute in that time. So the gather is issued
    once the device has that forward::

        forward 0 | wait for update 1, gather 1 | forward 1 | wait for update 2, gather 2 | ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Generic

import torch
from torch import Tensor, nn

from zeroshard.comm.agree import maxima
from zeroshard.comm.streams import ByDevice
from zeroshard.host.torch_internals import (
    as_plain,
    at_end_of_backward,
    in_backward,
    is_functorch_wrapped_tensor,
    storage_id,
)
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.core.forward import Forward, Forwards
from zeroshard.zero.core.parts import GradSink, LocalGrads, NestedUnits, Voter
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.schedule import ROOT, BackwardPass, Op, agreed_order, backward_ops
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.core.units import AnyGroup, Unit

MAX_REDUCTIONS_IN_FLIGHT = 2


class Passes(Generic[AnyGroup]):
    """Receives the events of hooks, and unshards, reshards and reduces units in the order of the schedule.

    Attributes:
        root, units, order: the root unit; the others; these as [Note: Order of execution] says.
        comm: the communicator of all ranks.
        sync: whether backward passes reduce; if False, their gradients accumulate.
        unreduced: whether the last backward pass left gradients on this rank that are not reduced yet.
        forward: the forward that is running, or the last one.
        backward: the backward pass that is running, or that an exception has ended; else None.
        pinned: whether all weights stay unsharded and current, as in `full_params`.
        keep_unsharded_for_graph: whether a backward ran with ``create_graph``: its graph may read weights without
            calling hooks.
        gathers_in_turn: whether updates of later units may still run when a forward begins.
        gathers_behind: whether a unit is gathered once the device has the forward of the one before: [Note: Behind].
        grads_leave: whether reduced gradients leave the device, so that local ones are freed unit by unit at any stage.
        called_by_parts: units of which only submodules were called in this forward: no hook frees their weights.
        trained: for each unit, the groups that take gradients in the backward that is running, or was last.

    Parts, of which the plain ones are None, or are made here:
        forwards: which forwards a backward goes through.
        note_gather: is told that this rank has issued a gather of a unit's weights.
        shown: what parameters show as ``grad``.
        nested: units inside of other units.
        before_forward: raises if this forward of the model would be wrong.
        after_forward: is told that the model returns, before weights that no call has waited for are shown and freed.
        local_grads: looks at this rank's own gradients before they are reduced.
        voters: what else ranks agree on at the end of a backward.
    """

    gathers_in_turn = gathers_behind = grads_leave = False

    def __init__(
        self,
        root: Unit[AnyGroup],
        units: list[Unit[AnyGroup]],
        ranks: RankGroups,
        strategy: ShardingStrategy,
        prefetch: int,
    ) -> None:
        self.root, self.units, self.order, self.prefetch = root, units, list(units), prefetch
        self.rank_groups, self.comm = ranks, ranks.world
        self.sync, self.unreduced = True, False
        self.pinned = self.keep_unsharded_for_graph = False
        self.forwards = Forwards()
        self.forward = self.forwards.current
        self.backward: BackwardPass | None = None
        self.note_gather: Callable[[Unit[AnyGroup]], object] | None = None
        self.shown: GradSink | None = None
        self.nested: NestedUnits | None = None
        self.before_forward: Callable[[], None] | None = None
        self.after_forward: Callable[[], None] | None = None
        self.local_grads: LocalGrads | None = None
        self.voters: list[Voter] = []
        self.called_by_parts: dict[Unit[AnyGroup], None] = {}
        self.trained: dict[Unit[AnyGroup], list[AnyGroup]] = {}
        self._order_agreed = not units
        self._ran: dict[Unit[AnyGroup], None] = {}  # units in order of their first call in the forward
        self._num_gathered = len(units)  # how many units of the order the forward has gathered
        self._until_backward: set[Unit[AnyGroup]] = set()  # units that stay unsharded when they return
        self._looked_at: set[Unit[AnyGroup]] = set()  # units at whose gradients `local_grads` looks in this backward
        self._in_flight: list[Unit[AnyGroup]] = []  # units whose reductions have begun, oldest first
        self._unfinished: list[Unit[AnyGroup]] = []  # those that have collectives left to issue, over replicas
        self._streams = ByDevice()
        self.use_streams()
        self.apply_strategy(strategy)

    def use_streams(self) -> None:
        """Have groups issue their collectives on the engine's streams."""
        for group in self.groups():
            group.use_streams(self._streams[group.params.full.device])

    def apply_strategy(self, strategy: ShardingStrategy) -> None:
        """From now on shard weights and gradients as this row of the stage table says."""
        several = self.rank_groups.shard_group.world_size > 1
        self.shard_params = any(group.params.shard_params for group in self.groups())
        self.shard_grads = several and strategy.grads is SHARD
        self.reshard_after_forward = strategy.reshard_after_forward
        self.num_ahead = len(self.order)  # stale weights that stay unsharded need no more memory if gathered at once
        self.apply_num_ahead()

    def apply_num_ahead(self) -> None:
        """Gather units in their turn where weights are sharded, or their masters change during forward."""
        if self.gathers_in_turn or self.shard_params:
            self.num_ahead = 0 if self.gathers_behind else self.prefetch
        self.shard_grads = self.shard_grads or self.grads_leave

    @property
    def in_one_piece(self) -> bool:
        """Whether nothing happens at the calls of units: [Note: One piece]."""
        weights_move = self.comm.world_size > 1 or self.shard_params or self.gathers_in_turn
        return not (weights_move or self.grads_leave) and all(group.grads.keep_local for group in self.groups())

    def all_units(self) -> list[Unit[AnyGroup]]:
        """The root unit, then the others."""
        return [self.root, *self.units]

    def groups(self) -> list[AnyGroup]:
        """Every flat group, unit by unit."""
        return [group for unit in (self.root, *self.units) for group in unit.groups]

    def drop_grads(self, params: set[nn.Parameter] | None) -> None:
        """Drop the gradients of these parameters; None: of all."""
        for group in self.groups():
            of_group = group.params.params
            slots = set(range(len(of_group))) if params is None else {i for i, p in enumerate(of_group) if p in params}
            if slots:
                group.clear_grads(slots)
        self.unreduced = self.unreduced and any(group.grads.pending for group in self.groups())

    # -- unsharded weights ------------------------------------------------------------------------------------

    def unshard(self, unit: Unit[AnyGroup], *, wait: bool = False, again: bool = False) -> None:
        """Issue the gather of the unit's weights, unless they are current; ``wait``: they are read next.

        ``again``: even if they are current, as other ranks may lack them. While all are pinned no rank does, and what
        the user has written there must neither be gathered over nor kept.
        """
        sent, again = False, again and not self.pinned
        for group in unit.groups:
            params = group.params
            if again or not params.state.readable:
                sent = (params.unshard(again=again) and params.sends) or sent
        if sent and self.note_gather is not None:
            self.note_gather(unit)
        if wait:  # the module's kernels, or backward's, read the weights next; until here computation went on
            unit.wait_for_unshard()

    def free(self, unit: Unit[AnyGroup]) -> None:
        """Free the unit's unsharded weights, unless they are pinned, or a running forward or later backward needs them.

        A backward may run in the middle of a forward (forces as the gradient of an energy).
        """
        needed = self.pinned or self.keep_unsharded_for_graph or unit.num_running_forwards or unit.keep_unsharded_after
        if self.shard_params and not needed:
            unit.reshard()

    def reshard(self, unit: Unit[AnyGroup]) -> None:
        """As `free`, unless the backward that is running needs the weights again."""
        if unit.active or (self.nested is not None and unit in self.nested.waiting):
            return
        if self.backward is None or not self.backward.calls_left(unit):
            self.free(unit)

    def views(self, unit: Unit[AnyGroup], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors that share storage with weights that are freed after forward."""
        if not self.shard_params:
            return []
        storages = {storage_id(group.params.full) for group in unit.groups}
        return [tensor for tensor in tensors if _storage(tensor) in storages]

    # -- forward ----------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit[AnyGroup]) -> None:
        """A unit is called, or recomputed in backward: gather the next ones, and wait for its own current weights."""
        if in_backward():
            self.pre_recompute(unit)
        else:
            if unit is self.root:
                self._begin_forward()
                self.unshard(unit)  # before the others', as it is waited for first
                self.gather_first(self.num_ahead)
                for other in self.units if unit.entered else ():  # [Note: One piece]
                    other.wait_for_unshard()
            else:
                self.gather_first(self.reached(unit))
            unit.num_running_forwards += 1
        self.unshard(unit, wait=True)  # after the gathers ahead were issued, which run while this one is waited for
        unit.entered = True

    def pre_recompute(self, unit: Unit[AnyGroup]) -> None:
        """Walk the schedule up to a unit that is recomputed, unless a recorded call of it still awaits its backward."""
        backward = self.backward
        if unit is not self.root and backward is not None and not backward.forward.calls.get(unit):
            backward.before(self._end(backward, unit, backward.forward))

    def _begin_forward(self) -> None:
        if self.before_forward is not None:
            self.before_forward()
        self._forget_backward()  # an exception may have ended one, or a forward
        if self.shown is not None:
            self.shown.begin_forward()  # before this forward takes memory: frees gradients set to None
        in_one_piece = self.in_one_piece
        for unit in self.all_units():
            unit.num_running_forwards, unit.entered = 0, in_one_piece
        self._ran, self._num_gathered, self.called_by_parts = {}, 0, {}
        # One answer for all units, called or skipped: every rank must keep the same units unsharded.
        keep = self.order[-1:] if self.reshard_after_forward else self.order  # [Note: The turn]
        self._until_backward = set(keep) if torch.is_grad_enabled() else set()
        self.forward = self.forwards.begin(grads=torch.is_grad_enabled())

    def reached(self, unit: Unit[AnyGroup]) -> int:
        """The forward has come to this unit: return how many units of the order are gathered by then."""
        self._ran.setdefault(unit)
        return self.order.index(unit) + 1 + (0 if self.gathers_behind else self.prefetch)

    def gather_first(self, num_units: int) -> None:
        """Gather so many units of the order, unless this forward has."""
        for unit in self.order[self._num_gathered : num_units]:
            self._num_gathered += 1
            self.unshard(unit)

    def post_forward(self, unit: Unit[AnyGroup], *, grads_flow: bool, keep_unsharded: bool = False) -> None:
        """A unit returns: free its weights, unless backward needs them at once; ``grads_flow``: it has a backward.

        ``keep_unsharded``: no hook will tell when backward needs its weights.
        """
        if keep_unsharded:
            unit.keep_unsharded_after[self.forward.index] = self.forward
        unit.num_running_forwards = max(unit.num_running_forwards - 1, 0)
        unit.entered = unit.num_running_forwards > 0
        if grads_flow:
            self.forward.calls[unit] = self.forward.calls.get(unit, 0) + 1
        if unit is self.root:
            self._end_forward(grads_flow=grads_flow)
            return
        if self.gathers_behind and self.prefetch:
            # Before the last use of this unit's memory ends, for which the next gather would wait.
            self.gather_first(self.order.index(unit) + 2)
        self._leave(unit)

    def _end_forward(self, *, grads_flow: bool) -> None:
        if self.after_forward is not None:
            self.after_forward()
        self.gather_first(len(self.order))  # other ranks may have called units that this one has not
        for skipped in [unit for unit in self.order if unit not in self._ran]:
            skipped.wait_for_unshard()  # its weights may be gathered again only after that
            self._leave(skipped)
        if not grads_flow:
            self.reshard(self.root)
        self.forward.ends()
        for unit in self.called_by_parts:
            self._leave(unit)

    def _leave(self, unit: Unit[AnyGroup]) -> None:
        if unit not in self._until_backward:
            self.reshard(unit)

    # -- backward ---------------------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit[AnyGroup], forward: Forward | None) -> None:
        """A call's outputs have their gradients: walk the schedule until the unit's weights are unsharded.

        ``forward``: None for a call that was recomputed in backward.
        """
        backward = self._running_backward(forward)
        backward.forward = forward = backward.forward if forward is None else forward
        if unit is self.root:
            self.unshard(unit, wait=True)  # a forward without gradients may have come in between and freed them
            return
        left = forward.calls[unit] = max(forward.calls.get(unit, 0) - 1, 0)
        unit.active += 1
        if left == 0:  # issues its own gather and those ahead, at their places in every rank's order
            backward.before(self._end(backward, unit, forward))
        if unit.read_in_backward:
            self.unshard(unit, wait=True)

    def post_backward(self, unit: Unit[AnyGroup], forward: Forward | None) -> None:
        """A call's inputs have their gradients: reduce the unit's, if no other call of it is still to come."""
        backward = self._running_backward(forward)
        forward = backward.forward if forward is None else forward
        unit.entered = False
        unit.active = max(unit.active - 1, 0)
        if unit is self.root or unit.active or forward.calls.get(unit):
            return  # another call of the unit is still to come, and adds to the same gradients
        backward.through(self._end(backward, unit, forward))
        self.reshard(unit)  # after its reduction was issued, and at once: the next unit's gather needs the memory
        waits = self.nested is not None and unit in self.nested.waiting
        if len(backward.forwards) > 1 and self.reshard_after_forward and not waits:
            self.free(unit)  # another forward's calls gather them again

    def expect_grad(self) -> None:
        """A gradient is about to arrive: begin the backward pass, if none runs."""
        if self.backward is None or self.backward.failed:
            self._begin_backward(None)

    def _running_backward(self, forward: Forward | None) -> BackwardPass:
        backward = self.backward
        return self._begin_backward(forward) if backward is None or backward.failed else backward

    def _begin_backward(self, forward: Forward | None) -> BackwardPass:
        self._forget_backward()  # an exception may have ended one
        if self.shown is not None:
            self.shown.apply_assigned_grads()
        if not self._order_agreed:
            # Units may be registered in another order than they run in: follow the one of rank 0's forward from now on.
            self.order = agreed_order(self.comm, self.units, list(self._ran))
            self._order_agreed = True
        forwards = self.forwards.of_backward(forward, self.rank_groups.shard_group if self.shard_params else None)
        ops = backward_ops(len(self.order), prefetch=self.prefetch, gather=self.shard_params)
        self.backward = backward = BackwardPass(ops, forwards, self.order, self._take)
        self.keep_unsharded_for_graph |= backward.creates_graph
        with as_plain():  # asked once for the pass, of parameters whose reads may be watched
            self.trained = {unit: unit.trained_groups() for unit in self.all_units()}
        self._looked_at = self.local_grads.units() if self.local_grads is not None and self.sync else set()
        for unit in backward.called_again if self.shard_params else ():
            self.unshard(unit)  # before the schedule, which has one place for each unit
        at_end_of_backward(uncompiled(self._end_backward))  # once autograd has handed over the last gradient
        return backward

    def _end(self, backward: BackwardPass, unit: Unit[AnyGroup], forward: Forward) -> Op:
        """The operation that follows the backward of the unit's calls in that forward."""
        return backward.end(self.order.index(unit), forward)

    def _take(self, op: Op) -> None:
        """Execute an operation of the schedule."""
        if self.nested is not None and op.action != "gather" and op.place != ROOT:
            if self.nested.postpones(op, self.order):  # [Note: Units inside of units] in `nested_units`
                return
            for inner in self.nested.due(self.order[op.place]):
                self._take_turn(inner)
        self._take_turn(op)

    def _take_turn(self, op: Op) -> None:
        unit = self.root if op.place == ROOT else self.order[op.place]
        if op.action == "reduce":
            self._reduce(unit)
        elif op.action == "gather":
            if unit.read_in_backward:
                self._gather_for(unit, op)
        else:
            backward = self.backward
            assert backward is not None
            needed = unit.active or unit in backward.called_again or backward.forwards[-1 - op.sweep].calls.get(unit)
            if self.reshard_after_forward and not needed:
                self.free(unit)

    def _gather_for(self, unit: Unit[AnyGroup], op: Op) -> None:
        backward = self.backward
        assert backward is not None
        others_may_have_freed_it = self.reshard_after_forward and (
            not backward.is_first(op.sweep) or (bool(unit.keep_unsharded_after) and unit not in self._until_backward)
        )
        if self._in_flight and self.prefetch <= 1 and not unit.readable:
            self._finish_older_reductions()
        # If it is needed, the next read of these weights triggers no hook.
        wait = bool(unit.active or unit in backward.called_again or unit.keep_unsharded_after)
        self.unshard(unit, again=others_may_have_freed_it, wait=wait)

    def _finish_older_reductions(self) -> None:
        """Wait for all reductions but the newest, because a gather is about to be issued: [Note: Ahead of a gather]."""
        # If the newest has collectives left, the one before has only just issued its last.
        if self._in_flight[-1] not in self._unfinished:
            while len(self._in_flight) > 1:
                self._in_flight.pop(0).wait_for_reduce()

    def _reduce(self, unit: Unit[AnyGroup]) -> None:
        if self.sync:
            if unit in self._looked_at and self.local_grads is not None:
                self.local_grads.before_reduce(unit)
            earlier = list(self._unfinished)
            self._begin_reduction(unit, self.trained[unit])
            self._issue(earlier)  # their first collective has had time to finish
            self._in_flight.append(unit)
            if self.shard_grads and len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                self._in_flight.pop(0).wait_for_reduce()  # and free its local gradients
        self.reshard(unit)

    def _begin_reduction(self, unit: Unit[AnyGroup], groups: list[AnyGroup]) -> None:
        """Start to reduce the gradients of these groups, used or not: every rank reduces the same. Collective."""
        more = [group.grads.reduce() for group in groups]
        if any(more):
            self._unfinished.append(unit)

    def _issue(self, units: list[Unit[AnyGroup]]) -> None:
        """Issue the next collective of these units' reductions, over replicas, say, in the order of `_reduce`."""
        for unit in units:
            more = [group.grads.issue() for group in unit.groups]
            if not any(more):
                self._unfinished.remove(unit)

    def _end_backward(self) -> None:
        backward = self.backward
        assert backward is not None
        try:
            backward.through(Op("reduce", ROOT))  # the last one, and those of units that this rank has skipped
            if self.sync:
                self._finish_reductions()
            self._forget_backward()
            for unit, trained in self.trained.items():
                self.reshard(unit)
                for group in trained:
                    group.unreduced = not self.sync
                    if self.sync and any(group.grads.used):
                        group.expose_grads()
        except BaseException:
            backward.ends_badly = True
            raise
        self.unreduced = not self.sync
        if self.shown is not None:
            self.shown.show_grads()

    def _finish_reductions(self) -> None:
        """Agree on who had gradients ([Note: Unused parameters] in `gradients`), reduce late ones, wait. Collective."""
        while self._unfinished:  # before the message below, as on ranks whose reductions have all been issued
            self._issue(list(self._unfinished))
        units = [(unit, groups) for unit, groups in self.trained.items() if groups]
        trained = [group for _, groups in units for group in groups]
        late = [any(chain.from_iterable(group.grads.written for group in groups)) for _, groups in units]
        flags = iter(self._agree([flag for group in trained for flag in group.grads.used] + late))
        for group in trained:
            group.grads.used = [next(flags) for _ in group.grads.used]
        for (unit, groups), is_late in zip(units, flags, strict=True):
            if is_late:
                self._begin_reduction(unit, groups)
        while self._unfinished:
            self._issue(list(self._unfinished))
        for group in trained:
            group.grads.wait_for_reduce()
            group.grads.num_backwards += 1
        self._in_flight = []  # all are done: what follows reads the reduced gradients

    def _agree(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether any rank has set it; and whatever else ranks vote on, in one message. Collective."""
        votes = [each.votes() for each in self.voters]
        agreed = maxima(self.comm, [*flags, *chain.from_iterable(votes)])
        end = len(flags)
        for voter, own in zip(self.voters, votes, strict=True):
            voter.agreed(agreed[end : end + len(own)])
            end += len(own)
        return list(map(bool, agreed[: len(flags)]))

    def _forget_backward(self) -> None:
        """End the backward pass; after a failure expect no backward of the other forwards either."""
        backward, self.backward = self.backward, None
        for unit in (self.root, *self.units):
            unit.active = 0
        if self.nested is not None:
            self.nested.waiting.clear()
        if backward is None:
            return
        for forward in backward.forwards:
            forward.calls.clear()
        over = None if backward.failed else [forward.index for forward in backward.forwards]
        self.forwards.forget(over)
        for unit in (self.root, *self.units):
            unit.forget_forwards(over)

    def forget_calls(self) -> None:
        """Forget all forwards that were run: weights have changed, and no backward of them is expected any more."""
        self.keep_unsharded_for_graph = False
        self.forwards.forget(None)
        for unit in self.all_units():
            unit.num_running_forwards = 0
            unit.forget_forwards()


def _storage(tensor: Tensor) -> int:
    """The identity of the tensor's storage; 0 if it has no storage that weights could be in."""
    if tensor.layout is not torch.strided or is_functorch_wrapped_tensor(tensor):
        return 0
    return storage_id(tensor)
