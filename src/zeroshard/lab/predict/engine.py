"""Records what the engine does at each event of a step, by running the engine without a model, memory or peers.

The engine is the real one (`zeroshard.zero.runtime.runtime.Runtime`). Its parameters are on the meta device, where they
have shapes and dtypes and no memory, and its communicator sends nothing. The events of a traced micro-batch
(`zeroshard.lab.predict.model_spans`) call it in place of a model's hooks. We record what it allocates, frees, computes,
issues and waits for at each event, so a plan and a run cannot differ in these.

[Note: Inside autograd]
    The engine asks autograd whether a backward is running, and queues a callback for its end. So the events of a
    backward are delivered from inside a real one: that of an operation which does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, Groups, ReduceOp, current_label
from zeroshard.comm.base import own_group
from zeroshard.comm.labels import is_on_side_stream, on_side_stream
from zeroshard.comm.streams import Lane, Mark, NoStreams
from zeroshard.lab.predict.actions import Issue, Message, Settings, Wait
from zeroshard.lab.predict.buffers import Buffer, own_numel
from zeroshard.lab.predict.conversions import BufferFormats, converted
from zeroshard.lab.predict.memory import buffers_away, streamed
from zeroshard.lab.predict.model_spans import ROOT, Event
from zeroshard.lab.predict.recorder import Alike, StorageEvents
from zeroshard.lab.predict.work import Work, work_of
from zeroshard.settings.wire_formats import SCALE_BYTES, BlockFormat
from zeroshard.zero import loaded_later
from zeroshard.zero.buffers.holdings import holdings
from zeroshard.zero.buffers.plain import BufferFacts
from zeroshard.zero.buffers.unit import FlatGroup, FlatUnit, gradient_settings
from zeroshard.zero.core.gradients import Gradients
from zeroshard.zero.core.layout import FlatLayout, Piece
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.reduction import GradientReducer
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.frozen_formats.coded import CodedGroup, CodedMembers, Codes
from zeroshard.zero.guards.collective_order import CollectiveOrder
from zeroshard.zero.offload.host_params import free_after_use
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.transport.exact_sum import CHUNK_NUMEL, OTHER_CHUNK_NUMEL
from zeroshard.zero.transport.exact_sums import ExactReducer
from zeroshard.zero.transport.members import ALL


@dataclass(frozen=True)
class Change:
    """The live bytes of ``category`` grow by ``num_bytes``, or shrink if it is negative."""

    category: str
    num_bytes: int


EngineAction = Change | Issue | Wait | Work


@lru_cache(maxsize=256)  # rows of a plan that differ only in micro-batch size share one recording
def recorded(
    events: tuple[Event, ...],
    units: tuple[str, ...],
    buffers: tuple[Buffer, ...],
    settings: Settings,
    syncs: tuple[bool, ...],
) -> list[list[list[EngineAction]]]:
    """Record what the engine does at each event of each micro-batch, in any step but the first.

    Args:
        events: the events of a micro-batch; all micro-batches have the same.
        units: names of the units in order of execution.
        buffers: the model's flat buffers, laid out for the ranks that shard together.
        settings: the engine's settings.
        syncs: for each micro-batch, whether its backward reduces gradients.

    Returns:
        the engine's actions, by micro-batch and event.
    """
    engine = _Engine(units, buffers, settings)
    with torch.enable_grad():
        engine.micro_batch(events, sync=True)  # the first step, in which ranks agree on the order of units
        engine.update()
        with engine.log:
            parts = [engine.micro_batch(events, sync=sync) for sync in syncs]
    return [[engine.log.named(actions) for actions in part] for part in parts]


class _Peers:
    """A `Communicator` of rank ``rank`` of ``world_size`` without peers: it records collectives and sends nothing."""

    control_device = torch.device("cpu")

    def __init__(self, world_size: int, rank: int, log: _Log, *, uniform_order: bool) -> None:
        self.world_size, self.rank, self.uniform_order = world_size, rank, uniform_order
        self._log = log

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> _Pending:
        """Record it."""
        return self._log.issue(self, "all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> _Pending:
        """Record it."""
        return self._log.issue(self, "reduce_scatter", input)

    def all_gather(self, output: Tensor, input: Tensor) -> _Pending:
        """Record it."""
        return self._log.issue(self, "all_gather", output)

    def all_to_all(self, output: Tensor, input: Tensor) -> _Pending:
        """Record it."""
        return self._log.issue(self, "all_to_all", input)

    def broadcast(self, tensor: Tensor, src: int) -> _Pending:
        """Record it."""
        return self._log.issue(self, "broadcast", tensor)

    def barrier(self) -> None:
        """Return at once."""

    def split(self, groups: Groups) -> _Peers:
        """The communicator of this rank's group."""
        _, ranks = own_group(groups, self.rank)
        return _Peers(len(ranks), ranks.index(self.rank), self._log, uniform_order=self.uniform_order)


class _Pending:
    """The handle of a recorded collective.

    ``gathered``: bytes of unsharded weights that were allocated for it; ``after``: what is computed after the wait.
    """

    def __init__(self, log: _Log, number: int, gathered: int, after: tuple[Work, ...]) -> None:
        self._log, self._number, self._gathered, self._after = log, number, gathered, after

    def wait(self) -> None:
        """Record the wait; the gathered weights now count as ``unit_buffers`` and no longer as ``prefetch``."""
        if is_on_side_stream():
            return
        self._log.actions += [Wait(self._number), *self._after]
        self._after = ()
        if self._gathered:
            self._log.actions += [Change("prefetch", -self._gathered), Change("unit_buffers", self._gathered)]
            self._gathered = 0


class _Beside(NoStreams):
    """A GPU's streams, as far as the recording needs them: a wait on the reduce stream does not block computation."""

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """On the reduce stream, have `_Pending.wait` record nothing: collectives among the same ranks run in order
        anyway. On the others it records a `Wait`, by which a collective over replicas follows its reduction.
        """
        return on_side_stream() if lane == "reduce" else super().on(lane, *after)


class _Log(StorageEvents):
    """Records what the engine does, in order.

    Attributes:
        actions: actions since the last event. An allocation or a free is a pair of a storage's number and its change in
            bytes, until `named` replaces it by a `Change` with a category.
    """

    def __init__(self) -> None:
        super().__init__(self._comes_or_goes, self._ran)
        self.actions: list[EngineAction | tuple[int, int]] = []
        self.rank_groups: RankGroups | None = None
        self.wires: dict[str, BufferFormats] = {}  # by buffer
        self.has_streams = False
        self.freed: dict[int, torch.UntypedStorage] = {}  # storages of the unsharded weights that the engine frees
        self._allocated: dict[int, int] = {}  # bytes of those of them that are allocated now
        self._number = 0
        self._categories: dict[int, str] = {}
        self._unknown: set[int] = set()
        self._temporary: set[int] = set()  # storages of earlier events that no unit had then

    def issue(self, comm: _Peers, op: str, unsharded: Tensor) -> _Pending:
        """Record a collective on the tensor ``unsharded``."""
        self.look_for_freed()
        gathered = self._grown()
        num_bytes = unsharded.nbytes
        if gathered:
            self.actions.append(Change("prefetch", gathered))
        self._number += 1
        label = current_label()
        control = label == CONTROL
        buffer, phase = (CONTROL, CONTROL) if control else label.rsplit("/", 1)
        assert self.rank_groups is not None
        nodes, replicas = self.rank_groups.nodes, comm is self.rank_groups.replicate_group and not control
        before, after = self._converted(comm, op, buffer, phase, replicas=replicas)
        replicas = replicas or (nodes is not None and comm is nodes.between)
        if not self.has_streams:
            self.actions += before
            before = ()
        message = Message(op, num_bytes, buffer, phase, comm.world_size)
        self.actions.append(Issue(self._number, message, replicas, control, before))
        return _Pending(self, self._number, gathered, after)

    def decoded(self, form: BlockFormat, layout: FlatLayout, itemsize: int) -> None:
        """Record that frozen weights are decoded from ``form`` into a buffer of ``layout``."""
        self.look_for_freed()
        if grown := self._grown():  # ranks that have all codes gather nothing
            self.actions.append(Change("unit_buffers", grown))
        if form.double:  # scales of the largest parameter
            scales = max(form.num_blocks(slot.numel) for slot in layout.slots) * SCALE_BYTES
            self.actions += [Change("temporaries", scales), Change("temporaries", -scales)]
        self.actions.append(converted("decode", form, layout.numel, len(layout.slots), itemsize))

    def _converted(
        self, comm: _Peers, op: str, buffer: str, phase: str, *, replicas: bool
    ) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """The conversions before and after a collective: none runs on the meta device, so the recording adds them."""
        wires = self.wires.get(buffer)
        if wires is None:
            return (), ()
        return wires.beside(op, phase, comm.world_size, replicas=replicas)

    def _grown(self) -> int:
        """Bytes of unsharded weights that were allocated since the last call; resizing a storage triggers no event."""
        grown = {key: each.nbytes() for key, each in self.freed.items() if key not in self._allocated and each.nbytes()}
        self._allocated.update(grown)
        return sum(grown.values())

    def look_for_freed(self) -> None:
        """Record unsharded weights that were freed since the last call: resizing a storage triggers no event."""
        for key in [key for key in self._allocated if not self.freed[key].nbytes()]:
            self.actions.append(Change("unit_buffers", -self._allocated.pop(key)))

    def _comes_or_goes(self, storage: int, change: int) -> None:
        self.actions.append((storage, change))
        if change > 0:
            self._unknown.add(storage)
        else:
            self._unknown.discard(storage)
            self._temporary.discard(storage)

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, alike: Alike | None) -> None:
        self.look_for_freed()
        work = work_of(func, args, kwargs, result, alike)
        if work is not None:
            self.actions.append(work)

    def take_actions(self, units: Iterable[FlatUnit]) -> list[EngineAction | tuple[int, int]]:
        """Return and clear the actions of the event that just ended; ``units``: all, the likeliest first."""
        self.look_for_freed()
        if self._unknown:
            for holding in holdings(units, (), {}):
                number = self.number_of(holding.tensor)
                if number in self._unknown or number in self._temporary:
                    self._categories[number] = holding.category
                    self._unknown.discard(number)
                    self._temporary.discard(number)
                    if not self._unknown:
                        break
            self._temporary |= self._unknown
            self._unknown.clear()
        actions, self.actions = self.actions, []
        return actions

    def named(self, actions: Sequence[EngineAction | tuple[int, int]]) -> list[EngineAction]:
        """Replace storages' numbers by their categories; a storage that was freed within its event is a temporary."""
        return [
            Change(self._categories.get(each[0], "temporaries"), each[1]) if isinstance(each, tuple) else each
            for each in actions
        ]


class _Engine:
    """Builds an engine from descriptions of buffers, and sends it events."""

    def __init__(self, names: Sequence[str], buffers: Sequence[Buffer], settings: Settings) -> None:
        self.log = log = _Log()
        self._settings = settings
        num_shards = max((buffer.layout.world_size for buffer in buffers), default=1)
        world = _Peers(num_shards * settings.num_replicas, settings.rank, log, uniform_order=settings.uniform_order)
        near = settings.strategy.secondary_shard_size if num_shards > 1 else None
        nodes = settings.nodes_of(num_shards)
        log.rank_groups = rank_groups = RankGroups.of(
            world, num_shards if settings.num_replicas > 1 else None, near, nodes, settings.reproducible
        )
        groups: dict[str, list[FlatGroup]] = {name: [] for name in ("root", *names)}
        self._grads: dict[str, tuple[FlatGroup, int, Tensor]] = {}
        offload = settings.offload
        on_gpu, place = settings.device_type == "cuda", "device" if offload is None else offload.grads
        goes_down = place == "disk" or (place == "host" and on_gpu)
        away, leaving = buffers_away(buffers, offload), []
        freed = streamed(buffers, settings)
        for buffer in buffers:
            assert buffer.unit in groups, f"a unit that the trace does not know: {buffer.unit}"
            make = partial(FlatGroup, members=ALL)
            if buffer.form is not None:
                make = partial(CodedGroup, members=_coded(buffer.form, log))
            elif goes_down and buffer.name in away:
                make = partial(_LeavingGroup, members=ALL, leaving=leaving)
            group = _group(buffer, settings, rank_groups, make)
            group.grads.adds_in_place = group.grads.adds_in_place and buffer.name not in away
            groups[buffer.unit].append(group)
            if buffer.name in freed:
                free_after_use(group.params)
            if isinstance(group.grads.reducer, ExactReducer):
                group.grads.reducer.chunk_numel = CHUNK_NUMEL.get(settings.device_type, OTHER_CHUNK_NUMEL)
            compute = buffer.policy(settings.precision).compute_dtype(buffer.dtype)
            log.wires[buffer.name] = _wires(buffer, group, settings)
            for index, slot in enumerate(buffer.layout.slots):
                grad = torch.empty(slot.shape, dtype=compute, device="meta")
                self._grads[slot.name] = (group, index, grad)
        looked_up = {buffer.unit for buffer in buffers if not buffer.read_in_backward}
        self._root, *self._units = [
            FlatUnit(name, nn.Module(), members, read_in_backward=name not in looked_up)
            for name, members in groups.items()
        ]
        self._runtime = Runtime(
            self._root,
            self._units,
            rank_groups,
            settings.strategy,
            settings.prefetch,
        )
        self._runtime.voters.append(_Guard())
        self._runtime.grads_leave = goes_down
        self._runtime.gathers_in_turn = self._runtime.gathers_behind = on_gpu and bool(away)
        self._runtime.apply_num_ahead()
        self._runtime.agree_by(CollectiveOrder(rank_groups))
        log.has_streams = settings.device_type == "cuda"
        self._trained = [group.grads for group in self._runtime.groups() if group.trained]
        for group in self._runtime.groups():
            if log.has_streams:
                group.use_streams(_Beside())
            log.ignore([group.params.full, group.params.master, *group.params.transport.resident])
            if group.params.shard_params:
                storage = group.params.full.untyped_storage()
                log.freed[storage._cdata] = storage
        log.ignore(grad for _, _, grad in self._grads.values())
        self._waiting_bytes = 0

    def micro_batch(self, events: Sequence[Event], *, sync: bool) -> list[list[EngineAction | tuple[int, int]]]:
        """Send the events of a forward and a backward; returns what the engine does at each."""
        self._runtime.sync = sync
        turn = next((i for i, event in enumerate(events) if event.name in _IN_BACKWARD), len(events))
        actions = [self._handle(event) for event in events[:turn]]
        *in_pass, over = events[turn:]
        assert over.name == "backward_over"

        def backward() -> None:
            actions.extend(map(self._handle, in_pass))

        # [Note: Inside autograd]
        _Backward.apply(torch.zeros((), requires_grad=True), backward).backward()
        return [*actions, self._take(self._root)]

    def _handle(self, event: Event) -> list[EngineAction | tuple[int, int]]:
        runtime = self._runtime
        unit = self._root if event.unit == ROOT else self._units[event.unit]
        if event.name in ("pre_forward", "recompute"):
            runtime.pre_forward(unit)
        elif event.name == "post_forward":
            runtime.post_forward(unit, grads_flow=event.grads_flow, keep_unsharded=event.keep_unsharded)
        elif event.name == "pre_backward":
            runtime.pre_backward(unit, runtime.forward)
        elif event.name == "post_backward":
            runtime.post_backward(unit, runtime.forward)
        elif event.name == "grad":
            group, slot, grad = self._grads[event.param if unit is self._root else f"{unit.name}.{event.param}"]
            runtime.expect_grad()
            group.grads.accumulate(slot, grad)
        return self._take(unit)

    def update(self) -> None:
        """Tell the engine that the optimizer has stepped, and clear gradients."""
        for group in self._runtime.groups():
            if group.trained:
                group.params.mark_stale()
        self._runtime.clear_grads()

    def _take(self, unit: FlatUnit) -> list[EngineAction | tuple[int, int]]:
        """The actions of an event of ``unit``."""
        actions = self.log.take_actions((unit, self._root, *self._units))
        waiting = sum([grads.small.num_bytes for grads in self._trained])
        if waiting != self._waiting_bytes:  # gradients to be copied; the trace has freed them
            actions.append(Change("temporaries", waiting - self._waiting_bytes))
            self._waiting_bytes = waiting
        return actions


class _Guard:
    """What guards add to the message in which ranks agree: a flag."""

    def votes(self) -> list[bool]:
        """One, not set."""
        return [False]

    def agreed(self, votes: list[int]) -> None:
        """Nothing was found."""


_IN_BACKWARD = ("pre_backward", "grad", "backward_over")


class _LeavingGrads(Gradients):
    """Gradients that go to the host, or from memory of a CPU to a file, as they are reduced.

    ``leaving`` is what is being copied from a GPU, of all groups: its memory is free when the next one is reduced.
    """

    def __init__(self, *args: Any, leaving: list[Tensor], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._leaving = leaving

    @property
    def away(self) -> _LeavingGrads:  # ty: ignore[incompatible-property-override] -- nobody assigns it
        """These gradients themselves."""
        return self

    @property
    def reduced_now(self) -> Tensor | None:
        """Nothing that holds memory of the device."""
        return None

    num_bytes = 0

    def come_back(self) -> None:
        """Nothing, as nothing is kept."""

    def land(self) -> None:
        """Nothing, as they have."""

    def pieces_there(self, pieces: Sequence[Piece], cuts: list[int]) -> list[Tensor]:
        """None."""
        return []

    def norms_there(self, norm_type: float) -> Tensor:
        """None."""
        return torch.zeros(0)

    def scale_later(self, factor: Tensor) -> None:
        """Nothing: the update does."""

    def keep(self, arrived: Tensor) -> None:
        """Have them leave."""
        self._leaving[:] = [arrived] if isinstance(self._streams, _Beside) else []
        if self.keep_local and not self.pending:
            self._local, self._views = None, []


class _LeavingGroup(FlatGroup):
    """A group with `_LeavingGrads`."""

    def __init__(self, *args: Any, leaving: list[Tensor], **kwargs: Any) -> None:
        self._leaving = leaving
        super().__init__(*args, **kwargs)

    def _gradients(self, facts: BufferFacts, reducer: GradientReducer) -> Gradients:
        settings = facts.layout, facts.strategy, facts.rank_groups
        own = {**gradient_settings(facts), "reducer": reducer, "leaving": self._leaving}
        return _LeavingGrads(facts.name, *settings, **own)


class _DecodedLater(Codes):
    """Codes without values. ``log`` hears when the engine would decode them."""

    def __init__(self, layout: FlatLayout, form: BlockFormat, num_shards: int, log: _Log) -> None:
        super().__init__(layout, form, num_shards)
        self._log = log

    def encode(self, flat: Tensor) -> Tensor:
        """Return codes without values."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=flat.device)

    def decode(self, codes: Tensor, flat: Tensor) -> Tensor:
        """Record it."""
        self._log.decoded(self._form, self._layout, flat.element_size())
        return flat


def _coded(form: BlockFormat, log: _Log) -> CodedMembers:
    members = CodedMembers(ALL, form, frozenset())
    members.codes = partial(_DecodedLater, log=log)
    return members


def _group(
    buffer: Buffer,
    settings: Settings,
    rank_groups: RankGroups,
    make: Callable[..., FlatGroup],
) -> FlatGroup:
    params = [
        (slot.name, nn.Parameter(torch.empty(slot.shape, dtype=buffer.dtype, device="meta"), buffer.trained))
        for slot in buffer.layout.slots
    ]
    return make(
        buffer.name,
        params,
        settings.strategy,
        rank_groups,
        buffer.policy(settings.precision),
        loaded_later,
        buffer.layout,
        frozen=not buffer.trained,
    )


def _wires(buffer: Buffer, group: FlatGroup, settings: Settings) -> BufferFormats:
    """The wire formats of a buffer's weights and gradients."""
    reduced = buffer.trained and settings.strategy.optim is SHARD
    grads = buffer.policy(settings.precision).gradients_format(buffer.dtype) if reduced else None
    params = group.params
    shards = own_numel(buffer.layout, params.comm.rank), params.comm.world_size
    return BufferFormats(params.transport.form, grads, *shards, params.full.dtype)


class _Backward(torch.autograd.Function):
    """An identity whose backward calls ``inside``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inside: Callable[[], None]) -> Tensor:
        ctx.inside = inside
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inside()
        return grads[0], None
