"""The forward and the backward of a step: at each event of a unit, what is unsharded, resharded and reduced.

[Note: Order of execution]
    The schedule has the units in one order on every rank. A rank may skip units, or call each of them once in another
    order: weights stay unsharded until they are used, and gradients that arrive after their unit was reduced are
    reduced once more. A unit that is called again after it was freed is gathered on the spot, so on every rank.

[Note: The turn]
    Backward begins with the unit that forward ended with. So every rank keeps the weights of the last unit of the order
    unsharded between the two, whether it called the unit or not: no computation could overlap with gathering them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from zeroshard.comm.agree import maxima
from zeroshard.comm.streams import ByDevice
from zeroshard.host.torch_internals import at_end_of_backward
from zeroshard.host.uncompiled import uncompiled
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.schedule import ROOT, Cursor, Op, backward_ops
from zeroshard.zero.core.strategy import SHARD, ShardingStrategy
from zeroshard.zero.core.units import AnyGroup, Unit

MAX_REDUCTIONS_IN_FLIGHT = 2
U = TypeVar("U", bound=Unit)


class Forward:
    """One forward of the model. ``calls``: for each unit, the number of its calls whose backward has not begun."""

    def __init__(self) -> None:
        self.calls: dict[Any, int] = {}

    def hook(self, tensors: Iterable[Tensor], event: Callable[[Tensor], None]) -> None:
        """Call ``event`` when a gradient reaches one of the tensors."""
        for tensor in tensors:
            tensor.register_hook(uncompiled(event))


class Passes(Generic[U, AnyGroup]):
    """Receives the events of hooks, and unshards, reshards and reduces units in the order of the schedule.

    Attributes:
        root, units, order: the root unit; the others; these as [Note: Order of execution] says.
        sync: whether backward passes reduce; if False, their gradients accumulate.
        forward: the forward that is running, or the last one.
        backward: the backward pass that is running, as a position in its schedule; else None.
    """

    def __init__(self, root: U, units: list[U], ranks: RankGroups, strategy: ShardingStrategy, prefetch: int) -> None:
        self.root, self.units, self.order, self.prefetch = root, units, list(units), prefetch
        self.rank_groups, self.comm = ranks, ranks.world
        self.sync, self.forward = True, Forward()
        self.backward = cast("Cursor | None", None)
        self._ran: dict[U, None] = {}  # units in order of their first call in the forward
        self._num_gathered = len(units)  # how many units of the order the forward has gathered
        self._until_backward: set[U] = set()  # units that stay unsharded when they return
        self._in_flight: list[U] = []  # units whose reductions have begun, oldest first
        self._unfinished: list[U] = []  # units whose reductions have collectives left to issue, over replicas
        self._streams = ByDevice()
        for group in self.groups():
            group.use_streams(self._streams[group.params.full.device])
        self.apply_strategy(strategy)

    def apply_strategy(self, strategy: ShardingStrategy) -> None:
        """Shard weights and gradients as this row of the stage table says."""
        several = self.rank_groups.shard_group.world_size > 1
        self.shard_params, self.shard_grads = several and strategy.params is SHARD, several and strategy.grads is SHARD
        self.reshard_after_forward = strategy.reshard_after_forward
        # Stale weights that stay unsharded need no more memory if they are gathered at once.
        self.num_ahead = self.prefetch if self.shard_params else len(self.order)

    def all_units(self) -> list[U]:
        """The root unit, then the others."""
        return [self.root, *self.units]

    def groups(self) -> Iterator[AnyGroup]:
        """Every flat group, unit by unit."""
        return (group for unit in self.all_units() for group in unit.groups)

    def unshard(self, unit: U, *, wait: bool = False) -> None:
        """Issue the gather of the unit's weights, unless they are current; ``wait``: they are read next."""
        unit.unshard()
        if wait:
            unit.wait_for_unshard()

    def reshard(self, unit: U) -> None:
        """Free the unit's unsharded weights, unless a call of it is running, or is to run in this backward."""
        if self.shard_params and not (unit.num_running_forwards or unit.active or self._calls_left(unit)):
            unit.reshard()

    def pre_forward(self, unit: U) -> None:
        """A unit is called: gather the next ones, and wait until its own weights are unsharded and current."""
        if unit is self.root:
            self._begin_forward()
        else:
            self._reach(unit)
        unit.num_running_forwards += 1
        self.unshard(unit, wait=True)

    def _begin_forward(self) -> None:
        self._forget_backward()  # an exception may have ended one, or a forward
        for unit in self.all_units():
            unit.num_running_forwards = 0
        self.forward, self._ran, self._num_gathered = Forward(), {}, 0
        # One answer for all units, called or skipped: every rank must keep the same units unsharded.
        keep = self.order[-1:] if self.reshard_after_forward else self.order  # [Note: The turn]
        self._until_backward = set(keep) if torch.is_grad_enabled() else set()
        self.unshard(self.root)
        self._gather_first(self.num_ahead)

    def _reach(self, unit: U) -> None:
        self._ran.setdefault(unit)
        self._gather_first(self.order.index(unit) + self.prefetch + 1)

    def _gather_first(self, num_units: int) -> None:
        for unit in self.order[self._num_gathered : num_units]:
            self._num_gathered += 1
            self.unshard(unit)

    def post_forward(self, unit: U, *, grads_flow: bool) -> None:
        """A unit returns: free its weights, unless backward needs them at once; ``grads_flow``: it has a backward."""
        unit.num_running_forwards = max(unit.num_running_forwards - 1, 0)
        if grads_flow:
            self.forward.calls[unit] = self.forward.calls.get(unit, 0) + 1
        if unit is not self.root:
            self._free(unit)
            return
        self._gather_first(len(self.order))  # other ranks may have called units that this one has not
        for skipped in [unit for unit in self.order if unit not in self._ran]:
            skipped.wait_for_unshard()  # its weights may be gathered again only after that
            self._free(skipped)
        if not grads_flow:
            self.reshard(unit)

    def _free(self, unit: U) -> None:
        if unit not in self._until_backward:
            self.reshard(unit)

    def pre_backward(self, unit: U, forward: Forward) -> None:
        """A call's outputs have their gradients: walk the schedule until the unit's weights are unsharded."""
        backward = self.backward or self._begin_backward(forward)
        if unit is self.root:
            self.unshard(unit, wait=True)  # a forward without gradients may have come in between and freed them
            return
        left = forward.calls[unit] = max(forward.calls.get(unit, 0) - 1, 0)
        unit.active += 1
        if left == 0:
            backward.before(self._end(unit, forward))
        if unit.read_in_backward:
            self.unshard(unit, wait=True)

    def post_backward(self, unit: U, forward: Forward) -> None:
        """A call's inputs have their gradients: reduce the unit's, if no other call of it is still to come."""
        backward = self.backward or self._begin_backward(forward)
        unit.active = max(unit.active - 1, 0)
        if unit is not self.root and not unit.active and not forward.calls.get(unit):
            backward.through(self._end(unit, forward))
            self.reshard(unit)

    def expect_grad(self, group: AnyGroup) -> None:
        """A gradient of a parameter of the group is about to arrive: begin the backward pass, if none runs."""
        if self.backward is None:
            self._begin_backward(None)

    def _begin_backward(self, forward: Forward | None) -> Cursor:
        self.backward = backward = self._new_backward(forward)
        for unit in self.order:  # before the schedule, which has one place for each unit
            if self.shard_params and unit.read_in_backward and self._calls_left(unit) > 1:
                self.unshard(unit)
        at_end_of_backward(uncompiled(self._end_backward))
        return backward

    def _new_backward(self, forward: Forward | None) -> Cursor:
        self._through = self.forward if forward is None else forward
        return Cursor(backward_ops(len(self.order), prefetch=self.prefetch, gather=self.shard_params), self._take)

    def _calls_left(self, unit: U) -> int:
        """Number of the unit's calls whose backward is still to come in the pass that is running."""
        return 0 if self.backward is None else self._through.calls.get(unit, 0)

    def _end(self, unit: U, forward: Forward) -> Op:
        """The operation that follows the backward of the unit's calls in that forward."""
        return Op("reduce", self.order.index(unit))

    def _take(self, op: Op) -> None:
        unit = self.root if op.place == ROOT else self.order[op.place]
        if op.action == "gather":
            if unit.read_in_backward:
                self.unshard(unit)
            return
        if self.sync:
            unit.reduce()
            self._reduce_across()  # for earlier units: their first collective has had time to finish
            self._unfinished.append(unit)
            self._in_flight.append(unit)
            if self.shard_grads and len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                self._in_flight.pop(0).wait_for_reduce()  # and free its local gradients
        self.reshard(unit)

    def _reduce_across(self) -> None:
        for unit in self._unfinished:
            unit.reduce_across()
        self._unfinished = [unit for unit in self._unfinished if unit.has_collectives_left]

    def _end_backward(self) -> None:
        assert self.backward is not None
        self.backward.through(Op("reduce", ROOT))  # the last one
        if self.sync:
            self._finish_reductions()
        self._forget_backward()
        for unit in self.all_units():
            self.reshard(unit)
            for group in unit.groups:
                group.unreduced = not self.sync and (group.trained or group.unreduced)
                if self.sync and any(group.grads.used):
                    group.expose_grads()

    def _finish_reductions(self) -> list[AnyGroup]:
        """Agree on who had gradients ([Note: Unused parameters] in `gradients`), reduce late ones, wait. Collective."""
        while self._unfinished:
            self._reduce_across()
        units = [unit for unit in self.all_units() if unit.trained_groups()]
        groups = [group for unit in units for group in unit.trained_groups()]
        late = [any(group.grads.pending for group in unit.groups) for unit in units]
        flags = iter(self._agree_on_flags([flag for group in groups for flag in group.grads.used] + late))
        for group in groups:
            group.grads.used = [next(flags) for _ in group.grads.used]
        for unit, is_late in zip(units, flags, strict=True):
            if is_late:
                unit.reduce()
        self._unfinished = units
        while self._unfinished:
            self._reduce_across()
        for unit in units:
            unit.wait_for_reduce()
        self._in_flight = []
        return groups

    def _forget_backward(self) -> None:
        self.backward = None
        for unit in self.all_units():
            unit.active = 0

    def _agree_on_flags(self, flags: list[bool]) -> list[bool]:
        """For each flag, whether any rank has set it. Collective."""
        return [bool(flag) for flag in maxima(self.comm, flags)]
