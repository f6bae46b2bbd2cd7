"""`Runtime`: unshards, reshards and reduces units at each event of forward and backward, in the order of the schedule.

A forward pass begins when the model is called. Weights that the last step made stale are refreshed in the same order
on every rank; sharded weights are gathered `prefetch` units ahead of their use and freed after it. A backward pass
begins with the first gradient that reaches a unit's output and ends when autograd is done. In between, units are
gathered and reduced as the schedule says (`zeroshard.zero.core.schedule`).

[Note: Order of execution]
    The schedule has the units in the order in which rank 0's forward called them; rank 0 broadcasts it at the first
    backward. A rank may skip units, or call each of them once in another order: weights that were gathered ahead stay
    unsharded until they are used, and gradients that arrive after their unit was reduced are reduced once more at the
    end. A unit that is called again after it was freed has no place in the schedule and is gathered on the spot, so
    every rank must call it again. If one does not, all raise after backward: [Note: Diverged] in `collective_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from zeroshard.comm.streams import ByDevice
from zeroshard.torch_internals import at_end_of_backward, in_backward
from zeroshard.uncompiled import uncompiled
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.core.schedule import ROOT, Op
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.rank_groups import RankGroups
from zeroshard.zero.runtime.backward_pass import BackwardPass, Run
from zeroshard.zero.runtime.collective_order import CollectiveOrder
from zeroshard.zero.runtime.forward_pass import ForwardPass
from zeroshard.zero.runtime.forwards import Forwards
from zeroshard.zero.runtime.grad_hooks import GradHooks
from zeroshard.zero.runtime.grad_refusals import refuse_stale_reads, require_usable
from zeroshard.zero.runtime.module_buffers import ModuleBuffers
from zeroshard.zero.runtime.module_hooks import ForwardRun
from zeroshard.zero.runtime.reductions import Reductions
from zeroshard.zero.runtime.unsharded_weights import Replaced, UnshardedWeights


class Runtime:
    """Receives the events of the module hooks and acts on them.

    Attributes:
        comm: the communicator of all ranks.
        collectives: through which ranks agree on orders, flags and the optimizers' settings.
        root, units: the root unit, and the others in order of registration.
        removed: whether `Zero.remove` has made the model an ordinary one again.
        sync: whether backward passes reduce; False inside `no_sync`.
        unreduced: whether the last backward pass left gradients on this rank that are not reduced yet.
        backward_pass: the backward pass that is running, or that an exception ended; else None.
        before_forward: raises if this forward of the model would be wrong; called before it begins.
    """

    def __init__(
        self,
        root: Unit,
        units: list[Unit],
        rank_groups: RankGroups,
        strategy: ShardingStrategy,
        prefetch: int,
        buffers: ModuleBuffers,
    ) -> None:
        self.root, self.units = root, units
        self.rank_groups, self.comm = rank_groups, rank_groups.world
        self.prefetch, self._streams = prefetch, ByDevice()
        self.collectives = CollectiveOrder(rank_groups, [root, *units])
        self._weights = UnshardedWeights([root, *units], self.collectives)
        self._reductions = Reductions(self.collectives, buffers)
        self.apply_strategy(strategy)
        self.sync = True
        self.removed = self.unreduced = False
        self.backward_pass: BackwardPass | None = None
        self.before_forward: Callable[[], None] = lambda: None
        self._order_agreed = False
        self._forwards = Forwards()
        self._forward_pass = ForwardPass(root, units, self._weights, prefetch)
        self._grad_hooks = GradHooks(self)
        self._attach()

    def all_units(self) -> list[Unit]:
        """The root unit, then the others."""
        return [self.root, *self.units]

    def groups(self) -> Iterator[FlatGroup]:
        """Every flat group, unit by unit."""
        return (group for unit in self.all_units() for group in unit.groups)

    def _attach(self) -> None:
        """Hook gradients and reads of stale weights; have groups issue their collectives on the engine's streams."""
        self._grad_hooks.attach(self.all_units())
        self._weights.watch_reads()
        for group in self.groups():
            group.use_streams(self._streams[group.params.full.device])

    # -- forward ----------------------------------------------------------------------------------------------

    @property
    def forward_run(self) -> ForwardRun:
        """The forward that is running, or the last one."""
        return self._forwards.current

    def pre_forward(self, unit: Unit) -> None:
        """Wait until the unit's weights are unsharded and current, and issue the gathers of the next units."""
        if in_backward():
            self._pre_recompute(unit)
        else:
            self._begin_forward() if unit is self.root else self._forward_pass.reach(unit)
            unit.num_running_forwards += 1
        unit.entered = True
        self._weights.unshard_and_wait(unit)

    def pre_forward_of_part(self, unit: Unit) -> None:
        """Unshard a unit whose submodule is called outside of the unit's forward: [Note: Parts] in `module_hooks`."""
        if in_backward():
            self._pre_recompute(unit)
        else:
            if unit is not self.root:
                self._forward_pass.reach(unit)
            if torch.is_grad_enabled():
                unit.keep_unsharded_after[self.forward_run.index] = self.forward_run
            elif unit is not self.root:
                self._forward_pass.by_parts.setdefault(unit)
        if unit.gather_in_flight or not unit.readable:
            self._weights.unshard_and_wait(unit)

    def _pre_recompute(self, unit: Unit) -> None:
        """Walk the schedule up to a unit that is recomputed, unless a recorded call of it still awaits its backward."""
        backward = self.backward_pass
        if unit is not self.root and backward is not None and not unit.calls.get(backward.forward_run):
            backward.before_end(unit, backward.forward_run)

    def _begin_forward(self) -> None:
        self.before_forward()
        if self.backward_pass is not None:
            self._forget_backward()  # an exception ended it
        self._grad_hooks.apply_assigned_grads()  # before this forward takes memory: frees gradients set to None
        self._grad_hooks.attach_trained()
        for unit in self.all_units():
            unit.num_running_forwards, unit.entered = 0, False  # an exception may have ended a forward
        self._forwards.begin(grads=torch.is_grad_enabled())
        self._forward_pass.begin(reshard_after_forward=self.reshard_after_forward)

    def post_forward(self, unit: Unit, *, grads_flow: bool, keep_unsharded: bool) -> None:
        """Free the unit's weights, unless backward needs them at once."""
        run = self.forward_run
        unit.num_running_forwards = max(unit.num_running_forwards - 1, 0)
        unit.entered = unit.num_running_forwards > 0
        if keep_unsharded:
            unit.keep_unsharded_after[run.index] = run
        if grads_flow:
            unit.calls[run.index] = unit.calls.get(run.index, 0) + 1
        if unit is self.root:
            self._forward_pass.gather_the_rest()
            run.ends()
            self._forward_pass.free_what_nobody_frees()
            if not grads_flow and not keep_unsharded:
                self._weights.reshard_unless_needed(unit)
            return
        if not keep_unsharded:
            self._forward_pass.free(unit)

    def views(self, unit: Unit, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return those of the tensors that share storage with weights that are freed after forward."""
        return self._weights.views(unit, tensors)

    # -- backward ---------------------------------------------------------------------------------------------

    def pre_backward(self, unit: Unit, forward_run: int | None) -> None:
        """Walk the schedule until this unit's weights are unsharded; see [Note: Which call] in `module_hooks`."""
        backward = self._backward(forward_run)
        forward_run = backward.forward_run = backward.forward_run if forward_run is None else forward_run
        if unit is self.root:
            self._weights.unshard_and_wait(unit)  # a forward without gradients may have come in between and freed them
            return
        left = unit.calls[forward_run] = max(unit.calls.get(forward_run, 0) - 1, 0)
        unit.active += 1
        if left == 0:
            backward.before_end(unit, forward_run)
        if unit.read_in_backward:
            self._weights.unshard_and_wait(unit)

    def post_backward(self, unit: Unit, forward_run: int | None) -> None:
        """Reduce the unit's gradients, if no other call of it is still to come."""
        backward = self._backward(forward_run)
        forward_run = backward.forward_run if forward_run is None else forward_run
        unit.active, unit.entered = max(unit.active - 1, 0), False
        if unit is self.root or unit.active or unit.calls.get(forward_run):
            return
        backward.through_end(unit, forward_run)
        if self.reshard_after_forward or not self._expected(unit):
            self._weights.reshard_unless_needed(unit)

    def _expected(self, unit: Unit) -> bool:
        """Whether calls of the unit are still to come in this backward."""
        backward = self.backward_pass
        return backward is not None and any(unit.calls.get(index) for index in backward.forward_runs)

    def _backward(self, forward_run: int | None = None) -> BackwardPass:
        """Return the running backward pass, or begin one; ``forward_run``: the forward whose outputs got gradients."""
        if self.backward_pass is not None and self.backward_pass.failed:
            self._forget_backward()
        if self.backward_pass is None:
            self._grad_hooks.apply_assigned_grads()
            if not self._order_agreed and self.units:  # [Note: Order of execution]
                order = self.collectives.agree_on_units(self.units, list(self._forward_pass.ran))
                self._forward_pass.take_order(order)
                self._weights.order = order
                self._order_agreed = True
            run = Run()
            self.backward_pass = BackwardPass(
                list(self._forward_pass.order),  # frozen units too: gradients may flow through them on one rank alone
                self._forwards_of_this_pass(forward_run),
                self._take,
                run,
                prefetch=self.prefetch,
                gather=self.shard_params,
            )
            self._weights.keep_unsharded_for_graph |= self.backward_pass.creates_graph
            self._keep_unsharded_what_runs_again(self.backward_pass)
            at_end_of_backward(partial(uncompiled(self._end_backward), run))
        return self.backward_pass

    def _forwards_of_this_pass(self, begun: int | None) -> list[int]:
        """Forwards that this backward goes through, latest first. Collective if several may and weights are sharded."""
        forwards = self._forwards
        for unit in self.all_units():
            unit.forget_calls(forwards.gone())
        if begun is None:
            begun = forwards.outstanding[-1] if forwards.outstanding else forwards.current.index
        if len(forwards.outstanding) <= 1:
            return [begun]
        votes = forwards.votes(begun)
        if self.shard_params:
            votes = self.collectives.agree_on_forwards(votes)
        return forwards.by_votes(votes) or [begun]

    def _take(self, op: Op) -> None:
        """Execute one operation of this backward's schedule."""
        backward = self.backward_pass
        assert backward is not None
        unit = self.root if op.place == ROOT else backward.units[op.place]
        if op.action == "gather":
            others_may_have_freed_it = self.reshard_after_forward and (
                not backward.is_first(op.sweep)
                or (bool(unit.keep_unsharded_after) and unit is not self._forward_pass.unsharded_until_backward)
            )
            if not unit.readable and self.prefetch <= 1:
                self._reductions.free_ahead_of_gather()
            self._weights.unshard(unit, again=others_may_have_freed_it)
            if unit.keep_unsharded_after or unit.keep_unsharded or unit.active:
                unit.wait_for_unshard()  # the next read of these weights triggers no hook
        elif op.action == "reduce":
            self._reduce(unit)
        elif self.reshard_after_forward and not (
            unit.active or unit.keep_unsharded or unit.calls.get(backward.run_of(op))
        ):
            self._weights.reshard_unless_needed(unit)

    def _keep_unsharded_what_runs_again(self, backward: BackwardPass) -> None:
        """Keep units unsharded that one forward called several times: the schedule has one place for each unit."""
        for unit in backward.units:
            several = any(unit.calls.get(index, 0) > 1 for index in backward.forward_runs)
            if several and self.shard_params and unit.read_in_backward:
                self._weights.unshard(unit)
                unit.keep_unsharded = True

    def forget_calls(self) -> None:
        """Forget all forwards that were run: weights have changed, and no backward of them is expected any more."""
        self.collectives.note_step()
        self._weights.keep_unsharded_for_graph = False
        self._forwards.forget()
        for unit in self.all_units():
            unit.num_running_forwards = 0
            unit.forget_calls()

    def _reduce(self, unit: Unit) -> None:
        if self.sync:
            self._reductions.start(unit, shard_grads=self.shard_grads)
        if unit is not self.root and not unit.active and not self._expected(unit):
            self._weights.reshard_unless_needed(unit)

    def _end_backward(self, run: Run) -> None:
        backward = self.backward_pass
        assert backward is not None
        try:
            backward.cursor.finish()
            if self.sync:
                self._reductions.finish(self.all_units())
        except BaseException:
            backward.fail()
            raise
        self.unreduced = not self.sync
        for unit in self.all_units():
            unit.forget_calls(backward.forward_runs)
            self._weights.reshard_unless_needed(unit)
            for group in unit.groups:
                group.unreduced = not self.sync and (group.trained or group.unreduced)
                if group.grads.reduced is not None:
                    group.expose_grads()
        self._forget_backward()
        self._grad_hooks.show_grads()

    def _forget_backward(self) -> None:
        """End the backward pass; after a failure expect no backward of the other forwards either."""
        backward, self.backward_pass = self.backward_pass, None
        over = None if backward is None or backward.failed else backward.forward_runs
        self._forwards.forget(over)
        for unit in self.all_units():
            unit.active = 0
            unit.keep_unsharded = False
            unit.forget_calls(over)

    # -- gradients --------------------------------------------------------------------------------------------

    def expect_grad(self, group: FlatGroup) -> None:
        """Begin the backward pass, if none runs: a gradient of a parameter of the group is about to arrive."""
        if self.backward_pass is None or self.backward_pass.failed:  # asked here too: this runs for each parameter
            self._backward()
        if self._forward_pass.read_while_stale:
            refuse_stale_reads(group, self._forward_pass.read_while_stale)

    def take_changes(self) -> None:
        """Copy in-place changes of weights to the master weights: [Note: Changes in place] in `written_weights`."""
        for group in self.groups():
            group.params.take_changes()

    def require_reduced(self, what: str) -> None:
        """Apply what the user has assigned to ``param.grad``, then raise if gradients are unusable: `require_shown`."""
        self._grad_hooks.apply_assigned_grads()
        self.require_shown(what)

    def require_shown(self, what: str) -> None:
        """Raise RuntimeError if gradients are not reduced, lack a graph that is needed, or the engine was removed."""
        require_usable(
            what,
            self.backward_pass,
            removed=self.removed,
            has_graph=self._weights.keep_unsharded_for_graph and torch.is_grad_enabled(),
            unreduced=self.unreduced,
        )

    def clear_grads(self, params: set[nn.Parameter] | None = None, *, set_to_none: bool = True) -> None:
        """Clear the gradients of ``params`` (None: of all), or set them to zero if ``set_to_none`` is False."""
        if params is None and self.backward_pass is not None and self.backward_pass.failed:
            self._forget_backward()
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
        for piece, shard in zip(group.params.pieces, group.shards, strict=True):
            if piece.slot in slots:
                shard.grad = None
        self.unreduced = self.unreduced and any(group.grads.pending for group in self.groups())

    def require_unpinned(self, what: str) -> None:
        """Raise RuntimeError inside `pinned`, which promises weights that are unsharded and current."""
        if self._weights.pinned:
            raise RuntimeError(f"{what}: it changes weights; call it outside full_params()")

    def laid_out_anew(self, groups: Iterable[FlatGroup]) -> None:
        """Hook gradients anew, after the parameters of these groups were moved to other buffers."""
        # A graph from before the move holds the old buffers; the new version makes autograd raise in its backward.
        torch.autograd.graph.increment_version([param for group in groups for param in group.params.params])
        self._attach()

    def apply_strategy(self, strategy: ShardingStrategy) -> None:
        """From now on shard weights and gradients as this row of the stage table says."""
        several = self.rank_groups.shard_group.world_size > 1
        self.shard_params = self._weights.shard_params = strategy.params is SHARD and several
        self.shard_grads = strategy.grads is SHARD and several
        self.reshard_after_forward = strategy.reshard_after_forward

    # -- unsharded weights ------------------------------------------------------------------------------------

    def pinned(self) -> AbstractContextManager[None]:
        """Keep all weights unsharded and current in this block. Collective on entry."""
        return self._weights.pin()

    def refresh_after_replacement(self, replaced: Replaced = "for good") -> None:
        """Refresh weights after the master weights changed outside of a step. Collective."""
        self._weights.refresh_after_replacement(replaced)

    @property
    def is_pinned(self) -> bool:
        """Whether this is inside `pinned`."""
        return self._weights.pinned

    @property
    def weights_readable(self) -> bool:
        """Whether the module's parameters are unsharded and current now."""
        return self._weights.readable

    def detach(self) -> None:
        """Remove the hooks on parameters, because the engine is being removed from its model."""
        self.removed = True
        self._grad_hooks.detach()
        self._weights.show_as_current()
