"""`Offloading`: an engine's state off the device. It makes the groups of units whose state is away, and steps them.

It is attached at three places: as the `Members` of these units, as an `Observer` of the engine, and as what updates
some pieces after ``step()`` has returned (`zeroshard.zero.optimizers.operands.LaterUpdates`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zeroshard.zero.buffers.flat_params import FlatParams
from zeroshard.zero.buffers.plain import BufferFacts, Members
from zeroshard.zero.buffers.unit import FlatGroup, gradient_settings
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.reduction import GradientReducer
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.core.units import Named
from zeroshard.zero.core.weights import WeightTransport
from zeroshard.zero.meta_models import Init
from zeroshard.zero.offload.disk import DiskStates
from zeroshard.zero.offload.executor import Executor, Job, Update
from zeroshard.zero.offload.grad_slots import GradSlots
from zeroshard.zero.offload.host_grads import HostGrads
from zeroshard.zero.offload.host_params import FrozenOnHost, HostParams, HostTransport
from zeroshard.zero.offload.on_disk import DiskOperands, GatherOrder, UnitOnDisk
from zeroshard.zero.offload.settings import Offload
from zeroshard.zero.offload.staging import Staging
from zeroshard.zero.optimizers.observer import Observer
from zeroshard.zero.optimizers.operands import Lists
from zeroshard.zero.optimizers.piecewise import PiecewiseOptimizer
from zeroshard.zero.runtime.runtime import Runtime


class HostGroup(FlatGroup):
    """A group whose master, optimizer states and reduced gradients are on the host, and are updated there.

    Attributes:
        stored: what of these is in the rank's file.
    """

    place = "host_"
    params: HostParams  # ty: ignore[incompatible-mutable-override] -- as `FlatGroup` narrows it
    grads: HostGrads

    def __init__(self, name: str, *args: Any, members: HostMembers, **kwargs: Any) -> None:
        self._at, self.update = members, Update(name, members.executor)
        places, file = members.settings, members.file
        on_disk = {
            "masters": places.master == "disk",
            "states": places.optimizer == "disk",
            "slots": members.slots,
            "order": members.order,
        }
        self.stored: UnitOnDisk = None if file is None else UnitOnDisk(file, **on_disk)  # ty: ignore[invalid-assignment] -- of a group without, nobody asks
        super().__init__(name, *args, members=members, **kwargs)

    def _weights(
        self, facts: BufferFacts, params: Named, init: Init | None, transport: WeightTransport, *, frozen: bool
    ) -> FlatParams:
        settings, at = (facts.strategy, facts.rank_groups, facts.precision, init, facts.layout), self._at
        stores = at.settings.master == "disk"
        host = HostTransport(transport, facts, place=at.settings.weights, staging=at.staging, stores=stores)
        own = {"update": self.update, "stored": self.stored}
        return HostParams(facts.name, params, *settings, frozen=frozen, transport=host, **own)

    def _gradients(self, facts: BufferFacts, reducer: GradientReducer) -> Gradients:
        settings, at_once = (facts.layout, facts.strategy, facts.rank_groups), self._at.settings.grads != "device"
        own = {"update": self.update, "at_once": at_once, "staging": self._at.staging, "stored": self.stored}
        return HostGrads(facts.name, *settings, **gradient_settings(facts), reducer=reducer, **own)

    @property
    def shards(self) -> list[nn.Parameter]:  # an attribute of `Group`, which waits here
        """The pieces that the optimizer updates, once no update of them is under way."""
        self.update.wait()
        if self.stored is not None:
            self.stored.wait()
        return self._shards

    def category(self, kind: str, value: Tensor | None = None) -> str:
        """As of a `FlatGroup`: of what is in a file, ``disk_...``."""
        is_stored = getattr(self._at.settings, kind) == "disk"
        if kind == "optimizer":  # numbers stay in memory
            is_stored = is_stored and value is not None and value.dim() > 0
        return f"disk_{kind}" if is_stored else super().category(kind, value)

    @property
    def shards_now(self) -> list[nn.Parameter]:
        """As `shards`, without waiting."""
        return self._shards

    @shards.setter
    def shards(self, shards: list[nn.Parameter]) -> None:
        self._shards = shards

    def clear_grads(self, slots: set[int]) -> None:
        """As of `Group`; pieces lose theirs once no update reads them."""
        self.grads.clear(slots)
        self.unreduced = self.unreduced and len(slots) < len(self.params.params)
        hidden = [shard for piece, shard in zip(self.params.pieces, self._shards, strict=True) if piece.slot in slots]
        self.update.then(partial(_drop_grads, hidden))


class FrozenGroup(FlatGroup):
    """A group of frozen weights, whose shards of stage 3 are on the host until it is trained."""

    def __init__(self, *args: Any, members: HostMembers, **kwargs: Any) -> None:
        self._at = members
        super().__init__(*args, members=members, **kwargs)

    def _weights(
        self, facts: BufferFacts, params: Named, init: Init | None, transport: WeightTransport, *, frozen: bool
    ) -> FlatParams:
        if not frozen or facts.strategy.params is not SHARD:
            return super()._weights(facts, params, init, transport, frozen=frozen)
        settings = facts.strategy, facts.rank_groups, facts.precision, init, facts.layout
        host = HostTransport(transport, facts, place="master", staging=self._at.staging)
        return FrozenOnHost(facts.name, params, *settings, host, frozen=True, staging=self._at.staging)

    @property
    def master_category(self) -> str:
        """``host_params`` of a shard that is on the host."""
        return "host_params" if isinstance(self.params.transport, HostTransport) else super().master_category

    def unfreeze(self) -> None:
        """Prepare for training, on the device."""
        if isinstance(self.params, FrozenOnHost) and isinstance(self.params.transport, HostTransport):
            self.params.come_back()
            for piece, shard in zip(self.params.pieces, self._shards, strict=True):
                shard.data = self.params.piece_of_master(piece)
        super().unfreeze()

    @property
    def shards(self) -> list[nn.Parameter]:  # an attribute of `Group`, which waits here
        """The pieces, which a load may write: no copy up reads them any more."""
        if isinstance(self.params.transport, HostTransport):
            self.params.transport.wait_for_sent()
        return self._shards

    @shards.setter
    def shards(self, shards: list[nn.Parameter]) -> None:
        self._shards = shards


def _drop_grads(pieces: Sequence[nn.Parameter]) -> None:
    for piece in pieces:
        piece.grad = None


class HostMembers(Members):
    """The members of a unit whose state is away: ``others``' ones, in groups of their own if they are trained."""

    def __init__(
        self,
        others: Members,
        settings: Offload,
        executor: Executor,
        staging: Staging,
        file: DiskStates | None,
        slots: GradSlots | None,
        order: GatherOrder,
    ) -> None:
        self._others, self.settings, self.executor, self.staging = others, settings, executor, staging
        self.file, self.slots, self.order = file, slots, order

    def transport(self, buffer: BufferFacts) -> WeightTransport:
        """That of the others."""
        return self._others.transport(buffer)

    def reducer(self, buffer: BufferFacts) -> GradientReducer:
        """That of the others."""
        return self._others.reducer(buffer)

    def group_class(self, params: list[tuple[str, nn.Parameter]]) -> Callable[..., Any] | None:
        """Parameters that are frozen at first have no state to keep elsewhere, and their weights may be streamed."""
        if any(param.requires_grad for _, param in params):
            return HostGroup
        return None if self.settings.weights == "device" else FrozenGroup


class Offloading(Observer):
    """The state of one engine that is off the device; ``settings``: which, ``file``: the rank's, if any is on disk."""

    category = "host_params"

    def __init__(self, settings: Offload, file: DiskStates | None = None) -> None:
        self.settings, self.executor, self.staging = settings, Executor(), Staging(settings.pinned_bytes)
        self._grad_slots = None if file is None or settings.grads != "disk" else GradSlots(file, self.staging)
        self.file, self._file_is_written = file, Update("after which the file is complete", self.executor)
        self._order = GatherOrder()
        self._stored: dict[nn.Parameter, HostGroup] = {}  # pieces with anything in the file
        self._runtime: Runtime | None = None

    def members(self, numels: Sequence[int], others: Members) -> list[Members]:
        """For units in the order of the forward, by their numbers of elements: each one's members."""
        num_away = self.settings.units_away(numels)
        at = (self.settings, self.executor, self.staging, self.file, self._grad_slots, self._order)
        own = HostMembers(others, *at)
        return [others] * (len(numels) - num_away) + [own] * num_away

    def attach(self, runtime: Runtime, observers: list[Observer]) -> None:
        """Take part in an engine's steps; its units were made with `members`."""
        self._runtime = runtime
        devices = sorted({str(group.params.full.device) for group in self._groups()})
        if len(devices) > 1:
            what = f"the model's parameters lie on {', '.join(devices)}"
            raise ValueError(f"offload.master: {self.settings.master!r}, and {what}; move the model to one device")
        runtime.complete_step = self.executor.drain
        runtime.gathers_in_turn = any(True for _ in self._groups())
        on_gpu = any(group.params.full.is_cuda for group in self._groups())
        runtime.grads_leave = self.settings.grads == "disk" or (on_gpu and self.settings.grads == "host")
        runtime.gathers_behind = on_gpu
        runtime.apply_num_ahead()
        self.staging.streams = runtime.streams_of(self._groups())
        observers.append(self)
        if self.file is not None:
            observers.append(Slots(self.file, self._grad_slots))

    def _groups(self) -> Iterator[HostGroup]:
        assert self._runtime is not None
        return (group for group in self._runtime.groups() if isinstance(group, HostGroup))

    # -- as an observer -------------------------------------------------------------------------------------------

    def optimizer_comes(self, piecewise: PiecewiseOptimizer) -> None:
        """Update its pieces that are away."""
        self.executor.drain()
        piecewise.operands.later = self
        if self.file is not None:  # first, as other members bring theirs from what it has brought
            in_file = DiskOperands(piecewise.optimizer, self._stored, lambda: self.executor.is_own_thread)
            piecewise.operands.members.insert(0, in_file)

    def layout_changes(self) -> None:
        """Complete the step first."""
        self.executor.drain()

    def before_step(self, members: set[nn.Parameter]) -> None:
        """Complete the last step."""
        self.executor.drain()
        if self.file is not None:
            self._stored.clear()
            self._stored.update((piece, group) for group in self._groups() for piece in group.shards_now)

    def require_weights(self, what: str) -> None:
        """Complete the last step, before its results are read or replaced."""
        self.executor.drain()

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The shards of weights that are on the host."""
        assert self._runtime is not None
        found = [(group.params.name, group.params.transport) for group in self._runtime.groups()]
        return [(name, tensor) for name, of in found if isinstance(of, HostTransport) for tensor in of.on_host]

    # -- updates after `step()` -----------------------------------------------------------------------------------

    def takes(self, group: FlatGroup) -> bool:
        """Whether the state of the group is away."""
        return isinstance(group, HostGroup)

    def wait(self) -> None:
        """Wait until the last step is complete."""
        self.executor.drain()

    def complete_grads(self) -> None:
        """Make all gradients final: a step is about to read them on this thread."""
        self.executor.drain()
        for group in self._groups():
            _ = group.grads.reduced
            group.params.take_checked()

    def arm(self, of: PiecewiseOptimizer, step: Callable[[Any], Any], units: Mapping[FlatGroup, Lists]) -> None:
        """Have these units updated in the order of the next forward, by the settings that the optimizer has now."""
        assert self._runtime is not None
        runtime, twin, operands = self._runtime, _twin(of.optimizer), of.operands.apart()
        order = (group for unit in (runtime.root, *runtime.order) for group in unit.groups)
        armed = [group for group in order if isinstance(group, HostGroup) and group in units]
        jobs: list[Job] = []
        for group in self._groups():
            if group not in units:  # no update waits for what was written into its weights
                group.params.take_checked()
        checks = [group.params.take_check() for group in armed]  # before anything of these units is read from a file
        for group in armed:
            factor, last = group.grads.take_factor(), partial(_cast, group)
            run = partial(_update, twin, step, operands, units[group], [*checks, factor], last)
            jobs.append((group.update, run))
            checks = []
        if self.file is not None and jobs:
            self._order.restart()
            self.file.expect([group.stored for group in armed if group.stored in self.file])
            jobs.append((self._file_is_written, self.file.settle))
        states = of.optimizer.state
        if isinstance(states, States):
            resized = of.operands.formatted is not None
            states.note_updates((p for group in units for p in chain.from_iterable(units[group])), resized=resized)
        self.executor.arm(jobs)

    def states(self, content: defaultdict[Any, Any]) -> defaultdict[Any, Any]:
        """Return an optimizer's states, which from now on wait for updates when they are read."""
        return content if isinstance(content, States) else States(content, self.executor)

    def loaded(self, optimizer: Any, group: FlatGroup) -> None:
        """Move states that were just loaded to the file, if they are to be there."""
        if isinstance(group, HostGroup) and group.stored is not None:
            group.stored.keep(optimizer, group.shards_now)
            group.stored.read_through()


class Slots(Observer):
    """Accounts for the memory through which state goes to and from the file."""

    category = "host_slots"

    def __init__(self, file: DiskStates, of_grads: GradSlots | None) -> None:
        self._file, self._of_grads = file, of_grads

    @property
    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """One tensor for each slot."""
        found = [torch.frombuffer(slot, dtype=torch.uint8) for slot in self._file.slots]
        return [("", slot) for slot in (*found, *(self._of_grads.memory if self._of_grads is not None else ()))]


def _twin(optimizer: Optimizer) -> Any:
    """An optimizer with the same states and the settings of now, to which the class's own ``step`` is given."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))

    def copied(value: Any) -> Any:
        return value.clone() if isinstance(value, Tensor) else value

    groups = [{key: copied(value) for key, value in group.items()} for group in optimizer.param_groups]
    twin.param_groups = groups
    return twin


def _update(
    twin: Any,
    step: Callable[[Any], Any],
    operands: Any,
    by_group: Lists,
    first: Sequence[Callable[[], None]],
    last: Callable[[], None],
) -> None:
    """Update one unit by the class's own code, on whichever thread."""
    for action in first:
        action()
    try:
        operands.bring_unit(twin, step, by_group)
        step(twin)
    finally:
        operands.take_back()
    last()


def _cast(group: HostGroup) -> None:
    """Bring the updated master to where the next gather needs it; one in a file was cast from its slot."""
    if group.stored is None or not group.stored.masters:
        group.params.take_update(group.params.master)


class States(defaultdict[Any, Any]):
    """``optimizer.state``: whoever reads it waits for the updates that change it, and that add to it in a first step.

    A key that is missing is made by the update, or refused by the factory that is set.
    """

    def __init__(self, content: defaultdict[Any, Any], executor: Executor) -> None:
        super().__init__(content.default_factory, content)
        self._executor = executor
        self._grows = False

    def note_updates(self, pieces: Iterable[nn.Parameter], *, resized: bool) -> None:
        """Note that these pieces are about to be updated: those without states get some.

        ``resized``: an update has states in another format than they are kept in.
        """
        self._grows = self._grows or resized or not all(dict.__contains__(self, piece) for piece in pieces)

    def peek(self) -> list[tuple[Any, Any]]:
        """The items, for their sizes, without waiting for updates that change nothing but values."""
        if self._grows:
            self._executor.drain()
            self._grows = False
        return list(dict.items(self))

    def __missing__(self, key: Any) -> Any:
        if self._executor.is_own_thread:
            return self.setdefault(key, {})
        return super().__missing__(key)

    def __reduce__(self) -> Any:  # a copied or pickled optimizer belongs to no engine
        return defaultdict, (self.default_factory, dict(self.items()))


def _waiting(name: str) -> Callable[..., Any]:
    own = getattr(defaultdict, name)

    def method(self: States, *args: Any, **kwargs: Any) -> Any:
        self._executor.drain()
        return own(self, *args, **kwargs)

    method.__name__, method.__doc__ = name, f"As of a dict, once no update is under way: ``{name}``."
    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__iter__", "__len__", "__contains__", "__eq__"):
    setattr(States, _name, _waiting(_name))
for _name in ("keys", "values", "items", "get", "pop", "popitem", "clear", "update", "setdefault", "copy"):
    setattr(States, _name, _waiting(_name))
