"""`Runtime`: the forward and backward passes of an engine, with what is attached to them.

Beside the core's `Passes` it follows recomputation inside backward, submodules that are called outside of their unit,
several forwards before one backward and graphs of backwards; it keeps weights unsharded for `full_params`, and
shows gradients in ``param.grad``. Ranks agree by an `Agreement`, and synchronise the model's buffers.

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
from typing import cast

import torch
from torch import Tensor, nn

from zeroshard.comm.module_buffers import ModuleBuffers
from zeroshard.comm.streams import Streams
from zeroshard.host.torch_internals import in_backward
from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.core.passes import Forward, Passes
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.schedule import ROOT, Op, backward_ops
from zeroshard.zero.core.strategy import ShardingStrategy
from zeroshard.zero.runtime.agreement import Agreement
from zeroshard.zero.runtime.backward_pass import BackwardPass
from zeroshard.zero.runtime.forwards import ForwardRun, Forwards
from zeroshard.zero.runtime.grad_hooks import GradHooks
from zeroshard.zero.runtime.nested_units import NestedUnits
from zeroshard.zero.runtime.unsharded_weights import UnshardedWeights


class PassObserver:
    """Notified of an engine's forwards and gradients, it refuses none; `zeroshard.zero.guards.pass_refusals` does."""

    def forward_ends(self) -> None:
        """The model returns, before weights that no call has waited for are shown and freed."""

    def require_shown(self, what: str) -> None:
        """``what`` needs gradients that are complete, and reduced over ranks."""


class LocalGrads:
    """Is notified of this rank's own gradients, and looks at none; `zeroshard.zero.guards.non_finite` does."""

    def before_reduce(self, unit: Unit) -> None:
        """The unit's gradients are about to be reduced."""

    def found(self) -> bool:
        """Whether there is something that other ranks must hear of."""
        return False

    def agreed(self, found: bool) -> None:
        """Whether some rank has ``found`` something. Collective, if one has."""

    def ranks(self) -> list[int]:
        """Return the ranks that have found something in the gradients that are there now. Collective."""
        return []

    def before_step(self) -> None:
        """An optimizer is about to step."""

    def cleared(self) -> None:
        """Gradients were cleared."""


class Runtime(Passes[Unit, FlatGroup]):
    """Receives the events of the module hooks and acts on them.

    Attributes:
        comm: the communicator of all ranks.
        collectives: through which ranks agree on orders and flags.
        gathers_in_turn: whether updates of later units may still run when a forward begins.
        gathers_behind: whether a unit is gathered once the device has the forward of the one before: [Note: Behind].
        grads_leave: whether reduced gradients leave the device, so that local ones are freed unit by unit at any stage.
        complete_step: waits for updates of the last step that are under way.
        removed: whether `Zero.remove` has made the model an ordinary one again.
        unreduced: whether the last backward pass left gradients on this rank that are not reduced yet.
        before_forward: raises if this forward of the model would be wrong; called before it begins.
        observer: is notified of forwards and gradients, and may refuse them.
        local_grads: looks at this rank's own gradients before they are reduced.
        weights: the unsharded weights of all units: gathers and frees them, keeps them for `full_params`.
        forward, backward: as of `Passes`; after an exception the backward pass is left, and says that it has failed.
    """

    rank_groups: RankGroups
    gathers_in_turn = gathers_behind = grads_leave = False
    forward: ForwardRun
    backward: BackwardPass | None

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        rank_groups: RankGroups,
        strategy: ShardingStrategy,
        prefetch: int,
        buffers: ModuleBuffers,
    ) -> None:
        self.collectives = Agreement(rank_groups)
        self.weights = UnshardedWeights([root, *units], self.collectives)
        self._buffers, self._buffers_changed = buffers, list[bool]()
        self._forwards, self._nested = Forwards(), NestedUnits(units)
        super().__init__(root, units, rank_groups, strategy, prefetch)
        self.forward = self._forwards.current
        self.removed = self.unreduced = False
        self.before_forward: Callable[[], None] = lambda: None
        self.complete_step: Callable[[], None] = lambda: None
        self.observer, self.local_grads = PassObserver(), LocalGrads()
        self._order_agreed = False
        self._called_by_parts: dict[Unit, None] = {}  # no hook frees their weights: only their submodules were called
        self._grad_hooks = GradHooks(self)
        self._attach()

    def _attach(self) -> None:
        """Hook gradients and reads of stale weights; have groups issue their collectives on the engine's streams."""
        self._grad_hooks.attach(self.all_units())
        self.weights.watch_reads()
        for group in self.groups():
            group.use_streams(self._streams[group.params.full.device])

    def apply_strategy(self, strategy: ShardingStrategy) -> None:
        """From now on shard weights and gradients as this row of the stage table says."""
        super().apply_strategy(strategy)
        self.shard_params = self.weights.shard_params = any(group.params.shard_params for group in self.groups())
        self.apply_num_ahead()

    def apply_num_ahead(self) -> None:
        """Gather units in their turn also where weights stay unsharded, if their masters change during forward."""
        if self.gathers_in_turn or self.shard_params:
            self.num_ahead = 0 if self.gathers_behind else self.prefetch
        self.shard_grads = self.shard_grads or self.grads_leave

    @property
    def in_one_piece(self) -> bool:
        """Whether nothing happens at the calls of units: [Note: One piece]."""
        weights_move = self.comm.world_size > 1 or self.shard_params or self.gathers_in_turn
        return not (weights_move or self.grads_leave) and all(group.grads.keep_local for group in self.groups())

    def streams_of(self, groups: Iterable[FlatGroup]) -> Streams:
        """The streams of the device that these groups have in common."""
        return self._streams[next((group.params.full.device for group in groups), torch.device("cpu"))]

    def unshard(self, unit: Unit, *, wait: bool = False, again: bool = False) -> None:
        """Issue the gather of the unit's weights; ``again``: even if they are current, as other ranks may lack them."""
        self.weights.unshard(unit, again=again)
        if wait:
            unit.wait_for_unshard()

    def reshard(self, unit: Unit) -> None:
        """Free the unit's unsharded weights, unless they are pinned, or this or a later backward needs them."""
        if not (unit.active or unit in self._nested.waiting or self._calls_left(unit)):
            self.weights.reshard_unless_needed(unit)

    # -- forward ----------------------------------------------------------------------------------------------

    def pre_forward(self, unit: Unit) -> None:
        """A unit is called, or recomputed in backward: wait until its weights are unsharded and current."""
        if in_backward():
            self._pre_recompute(unit)
            self.unshard(unit, wait=True)
        else:
            super().pre_forward(unit)
        unit.entered = True

    def pre_forward_of_part(self, unit: Unit) -> None:
        """Unshard a unit whose submodule is called outside of the unit's forward: [Note: Parts] in `module_hooks`."""
        if self.in_one_piece:
            pass  # nothing to walk, and nothing is freed
        elif in_backward():
            self._pre_recompute(unit)
        else:
            if unit is not self.root:
                self._reach(unit)
            if torch.is_grad_enabled():
                unit.keep_unsharded_after[self.forward.index] = self.forward
            elif unit is not self.root:
                self._called_by_parts.setdefault(unit)
        if unit.gather_in_flight or not unit.readable:
            self.unshard(unit, wait=True)

    def _pre_recompute(self, unit: Unit) -> None:
        """Walk the schedule up to a unit that is recomputed, unless a recorded call of it still awaits its backward."""
        backward = self.backward
        if unit is not self.root and backward is not None and not backward.forward.calls.get(unit):
            backward.before(self._end(unit, backward.forward))

    def _begin_forward(self) -> None:
        self.before_forward()
        self._forget_backward()  # an exception may have ended one
        self._grad_hooks.apply_assigned_grads()  # before this forward takes memory: frees gradients set to None
        self._grad_hooks.attach_trained()
        self._called_by_parts = {}
        in_one_piece = self.in_one_piece
        for unit in self.all_units():
            unit.entered = in_one_piece
        super()._begin_forward()
        for unit in self.units if in_one_piece else ():
            unit.wait_for_unshard()
        self.forward = self._forwards.begin(grads=torch.is_grad_enabled())

    def _reach(self, unit: Unit) -> None:
        if self.gathers_behind:
            self._ran.setdefault(unit)
            self._gather_first(self.order.index(unit) + 1)
        else:
            super()._reach(unit)

    def post_forward(self, unit: Unit, *, grads_flow: bool, keep_unsharded: bool = False) -> None:
        """A unit returns. ``keep_unsharded``: no hook will tell when backward needs its weights."""
        if keep_unsharded:
            unit.keep_unsharded_after[self.forward.index] = self.forward
        if unit is self.root:
            self.observer.forward_ends()
        elif self.gathers_behind and self.prefetch:
            self._gather_first(self.order.index(unit) + 2)  # before its last use ends, for which its gather would wait
        super().post_forward(unit, grads_flow=grads_flow)
        unit.entered = unit.num_running_forwards > 0
        if unit is self.root:
            self.forward.ends()
            for called_by_parts in self._called_by_parts:
                self._free(called_by_parts)

    def views(self, unit: Unit, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors that share storage with weights that are freed after forward."""
        return self.weights.views(unit, tensors)

    # -- backward ---------------------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit, forward: Forward | None) -> None:
        """A call's outputs have their gradients; ``forward``: None for a call that was recomputed in backward."""
        backward = self._running_backward(forward)
        backward.forward = forward = backward.forward if forward is None else forward
        super().pre_backward(unit, forward)

    def post_backward(self, unit: Unit, forward: Forward | None) -> None:
        """A call's inputs have their gradients; ``forward``: None for a call that was recomputed in backward."""
        backward = self._running_backward(forward)
        forward = backward.forward if forward is None else forward
        unit.entered = False
        super().post_backward(unit, forward)
        over = unit is not self.root and not unit.active and not forward.calls.get(unit)
        over = over and unit not in self._nested.waiting
        if over and self.reshard_after_forward and len(backward.forwards) > 1:
            self.weights.reshard_unless_needed(unit)  # another forward's calls gather them again

    def _running_backward(self, forward: Forward | None) -> BackwardPass:
        backward = self.backward
        return self._begin_backward(forward) if backward is None or backward.failed else backward

    def _begin_backward(self, forward: Forward | None) -> BackwardPass:
        self._forget_backward()  # an exception may have ended one
        self._grad_hooks.apply_assigned_grads()
        if not self._order_agreed and self.units:
            # Units may be registered in another order than they run in: follow the one of rank 0's forward from now on.
            self.order = self.weights.order = self.collectives.agree_on_units(self.units, list(self._ran))
            self._order_agreed = True
        return cast("BackwardPass", super()._begin_backward(forward))

    def _new_backward(self, forward: Forward | None) -> BackwardPass:
        forwards = self._forwards_of_this_pass(cast("ForwardRun | None", forward))
        ops = backward_ops(len(self.order), prefetch=self.prefetch, gather=self.shard_params)
        backward = BackwardPass(ops, forwards, self.order, self._take)
        self.weights.keep_unsharded_for_graph |= backward.creates_graph
        return backward

    def _forwards_of_this_pass(self, begun: ForwardRun | None) -> list[ForwardRun]:
        """Forwards that this backward goes through, latest first. Collective if several may and weights are sharded.

        ``begun``: the forward whose outputs got gradients first, if known.
        """
        forwards = self._forwards
        if begun is None:
            index = forwards.outstanding[-1] if forwards.outstanding else forwards.current.index
            begun = forwards.find(index) or ForwardRun(index)
        if len(forwards.outstanding) <= 1:
            return [begun]
        votes = forwards.votes(begun.index)
        if self.shard_params:
            votes = self.collectives.agree_on_forwards(votes)
        return [forwards.find(index) or ForwardRun(index) for index in forwards.by_votes(votes)] or [begun]

    def _calls_left(self, unit: Unit) -> int:
        return 0 if self.backward is None else self.backward.calls_left(unit)

    def _end(self, unit: Unit, forward: Forward) -> Op:
        assert self.backward is not None
        return self.backward.end(self.order.index(unit), forward)

    def _take(self, op: Op) -> None:
        backward = self.backward
        assert backward is not None
        if op.action != "gather" and op.place != ROOT:
            if self._nested.postpones(op, self.order):  # [Note: Units inside of units] in `nested_units`
                return
            for inner in self._nested.due(self.order[op.place]):
                self._take_turn(backward, inner)
        self._take_turn(backward, op)

    def _take_turn(self, backward: BackwardPass, op: Op) -> None:
        if op.action == "reduce":
            if self.sync:
                self.local_grads.before_reduce(self.root if op.place == ROOT else self.order[op.place])
            super()._take(op)
            return
        unit = self.order[op.place]
        needed = unit.active or unit in backward.called_again
        if op.action == "free":
            if self.reshard_after_forward and not needed and not backward.forward_of(op).calls.get(unit):
                self.weights.reshard_unless_needed(unit)
        elif unit.read_in_backward:
            others_may_have_freed_it = self.reshard_after_forward and (
                not backward.is_first(op.sweep)
                or (bool(unit.keep_unsharded_after) and unit not in self._until_backward)
            )
            if not unit.readable and self.prefetch <= 1:
                self._finish_older_reductions()
            # If it is needed, the next read of these weights triggers no hook.
            wait = bool(needed or unit.keep_unsharded_after)
            self.unshard(unit, again=others_may_have_freed_it, wait=wait)

    def _finish_older_reductions(self) -> None:
        """Wait for all reductions but the newest, because a gather is about to be issued: [Note: Ahead of a gather]."""
        # If the newest has collectives left, the one before has only just issued its last.
        if self._in_flight and not self._in_flight[-1].has_collectives_left:
            while len(self._in_flight) > 1:
                self._in_flight.pop(0).wait_for_reduce()

    def forget_calls(self) -> None:
        """Forget all forwards that were run: weights have changed, and no backward of them is expected any more."""
        self.collectives.note_step()
        self.weights.keep_unsharded_for_graph = False
        self._forwards.forget()
        for unit in self.all_units():
            unit.num_running_forwards = 0
            unit.forget_forwards()

    def _end_backward(self) -> None:
        backward = self.backward
        assert backward is not None
        try:
            super()._end_backward()
        except BaseException:
            backward.fail()
            raise
        self.unreduced = not self.sync
        self._grad_hooks.show_grads()

    def _finish_reductions(self) -> list[FlatGroup]:
        groups = super()._finish_reductions()
        for group in groups:
            group.grads.num_backwards += 1
        self._buffers.sync(self._buffers_changed)
        return groups

    def _forget_backward(self) -> None:
        """End the backward pass; after a failure expect no backward of the other forwards either."""
        backward = self.backward
        self._nested.waiting.clear()
        super()._forget_backward()
        if backward is None:
            return
        for forward in backward.forwards:
            forward.calls.clear()
        over = None if backward.failed else [forward.index for forward in backward.forwards]
        self._forwards.forget(over)
        for unit in self.all_units():
            unit.forget_forwards(over)

    # -- agreement --------------------------------------------------------------------------------------------

    def agree_by(self, collectives: Agreement) -> None:
        """From now on agree with other ranks by ``collectives``."""
        self.collectives = self.weights.collectives = collectives

    def _agree_on_flags(self, flags: list[bool]) -> list[bool]:
        """Also whether gradients are NaN/Inf, and which buffers of modules and which weights any rank has written to.

        Sharded weights are written to in `full_params` alone, which compares them itself.
        """
        groups = [group for group in self.groups() if not group.params.shard_params]
        written = [group.params.has_writes for group in groups]
        found, *agreed = self.collectives.agree_on_flags(
            [self.local_grads.found(), *flags, *written, *self._buffers.changed()]
        )
        self.local_grads.agreed(found)
        changed = [group for group, flag in zip(groups, agreed[len(flags) :], strict=False) if flag]
        if changed:
            self.collectives.require_same_weights(changed)
            for group in changed:
                group.params.take_compared()
        self._buffers_changed = agreed[len(flags) + len(written) :]
        return agreed[: len(flags)]

    # -- gradients --------------------------------------------------------------------------------------------

    def expect_grad(self, group: FlatGroup) -> None:
        """Begin the backward pass, if none runs: a gradient of a parameter of the group is about to arrive."""
        if self.backward is None or self.backward.failed:
            self._begin_backward(None)

    def note_writes(self) -> None:
        """Have ranks compare, at the next backward, what was written into unsharded weights and gradients before."""
        stay = [group for group in self.groups() if not group.params.shard_params]
        if stay and self.comm.world_size > 1:
            changed = [group for group in stay if group.params.has_writes or group.params.has_untraced_writes]
            self.collectives.note_writes(changed)
            self.collectives.note_grad_writes(group for group in stay if group.grads.has_writes)

    def take_changes(self, *, waits: bool = True) -> None:
        """Copy in-place changes of weights to the master weights: [Note: Changes in place] in `flat_params`."""
        for group in self.groups():
            group.params.take_changes(waits=waits)

    def require_reduced(self, what: str) -> None:
        """Apply what the user has assigned to ``param.grad``, then raise if gradients are unusable: `require_shown`."""
        self._grad_hooks.apply_assigned_grads()
        self.require_shown(what)

    def require_same_grads(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Raise ValueError if ranks have assigned different gradients, ``(name, tensor)`` each. Collective."""
        self.collectives.require_same_grads(grads)

    def require_shown(self, what: str) -> None:
        """Raise RuntimeError if gradients are not reduced, lack a graph that is needed, or the engine was removed."""
        self.observer.require_shown(what)

    def read_in_pass(self, params: FlatParams) -> bool:
        """Code of the user's reads sharded weights outside of their unit's call: in a forward or backward gather them.

        They are gathered as for a call of a part, on every rank alike. Returns whether a pass runs.
        """
        runs = bool(self.root.num_running_forwards) or in_backward()
        if runs:
            self.pre_forward_of_part(next(u for u in self.all_units() if any(g.params is params for g in u.groups)))
        return runs

    def clear_grads(self, params: set[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero if ``set_to_none`` is False."""
        if params is None and self.backward is not None and self.backward.failed:
            self._forget_backward()
        self.local_grads.cleared()
        if params is not None and len(params) == sum(len(group.params.params) for group in self.groups()):
            params = None  # all of them: no need to look up each
        for group in self.groups():
            chosen = {i for i, p in enumerate(group.params.params) if params is None or p in params}
            if chosen:
                self.clear_slots(group, chosen) if set_to_none else group.grads.zero(chosen)
        if set_to_none:
            self._grad_hooks.hide_grads(params)

    def clear_slots(self, group: FlatGroup, slots: set[int]) -> None:
        """Clear the gradients of the group's parameters in these slots."""
        group.unreduced = group.unreduced and len(slots) < len(group.params.params)
        group.grads.clear(slots)
        group.hide_grads(slots)
        self.unreduced = self.unreduced and any(group.grads.pending for group in self.groups())

    def require_unpinned(self, what: str) -> None:
        """Raise RuntimeError inside `UnshardedWeights.pin`, which promises weights that are unsharded and current."""
        if self.weights.pinned:
            raise RuntimeError(f"{what}: it changes weights; call it outside full_params()")

    def laid_out_anew(self, groups: Iterable[FlatGroup]) -> None:
        """Hook gradients anew, after the parameters of these groups were moved to other buffers."""
        # A graph from before the move holds the old buffers; the new version makes autograd raise in its backward.
        torch.autograd.graph.increment_version([param for group in groups for param in group.params.params])
        self._attach()

    def detach(self) -> None:
        """Remove the hooks on parameters, because the engine is being removed from its model."""
        self.removed = True
        self._grad_hooks.detach()
        self.weights.show_as_current()
