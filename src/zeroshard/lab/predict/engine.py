"""The engine itself, run without a model, without memory and without peers: what it does at each event of a step.

`zeroshard.zero.runtime.runtime.Runtime` is built over parameters on the meta device, which have shapes and dtypes and
no memory, and over a communicator that sends nothing. It is told the events of a traced micro-batch
(`zeroshard.lab.predict.model_spans`) in the place of a model's hooks. What it allocates, frees, computes, issues and
waits for at each event is written down, so a plan and a run cannot differ in it.

[Note: Inside autograd]
    The engine asks autograd whether a backward is running, and has it call the end of one. So the events of a backward
    are told from inside the backward of an operation that does nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.comm import CONTROL, Groups, ReduceOp, current_scope
from zeroshard.comm.base import own_group
from zeroshard.comm.labels import beside, is_beside
from zeroshard.lab.predict.actions import Message, Settings
from zeroshard.lab.predict.buffers import Buffer
from zeroshard.lab.predict.conversions import BufferFormats
from zeroshard.lab.predict.model_spans import ROOT, Event
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.lab.predict.work import Work, work_of
from zeroshard.zero import loaded_later
from zeroshard.zero.buffers.holdings import holdings
from zeroshard.zero.buffers.leaves import CHUNK_NUMEL, OTHER_CHUNK_NUMEL
from zeroshard.zero.buffers.unit import FlatGroup, Unit
from zeroshard.zero.levels import Levels
from zeroshard.zero.runtime.module_buffers import ModuleBuffers
from zeroshard.zero.runtime.runtime import Runtime
from zeroshard.zero.strategy import SHARD
from zeroshard.zero.streams import Lane, Mark, NoStreams


@dataclass(frozen=True)
class Change:
    """So many bytes more of a category, or fewer."""

    category: str
    num_bytes: int


@dataclass(frozen=True)
class Sent:
    """A collective is started; the rest as `zeroshard.lab.predict.actions.Issue` has it."""

    number: int
    message: Message
    replicas: bool
    control: bool
    work: tuple[Work, ...] = ()


@dataclass(frozen=True)
class Waited:
    """Nothing is computed until that collective is done."""

    number: int


EngineAction = Change | Sent | Waited | Work


@lru_cache(maxsize=256)  # rows of a plan differ in their micro-batches, of which the engine knows nothing
def recorded(
    events: tuple[Event, ...],
    units: tuple[str, ...],
    buffers: tuple[Buffer, ...],
    settings: Settings,
    syncs: tuple[bool, ...],
) -> list[list[list[EngineAction]]]:
    """What the engine does at each event of each micro-batch, in a step that follows another.

    Args:
        events: of a micro-batch, which all are alike.
        units: names in order of execution.
        buffers: of the model, laid out for the ranks that shard together.
        settings: of the engine.
        syncs: for each micro-batch, whether its backward reduces.
    """
    engine = _Engine(units, buffers, settings)
    with torch.enable_grad():
        engine.micro_batch(events, sync=True)  # ranks agree on the order of units
        engine.update()
        with engine.log:
            parts = [engine.micro_batch(events, sync=sync) for sync in syncs]
    return [[engine.log.named(told) for told in part] for part in parts]


class _Peers:
    """Rank ``rank`` of ``world_size``, alone: each operation is written down and does nothing."""

    control_device = torch.device("cpu")

    def __init__(self, world_size: int, rank: int, log: _Log, *, uniform_order: bool) -> None:
        self.world_size, self.rank, self.uniform_order = world_size, rank, uniform_order
        self._log = log

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> _Pending:
        """Write it down."""
        return self._log.issue(self, "all_reduce", tensor)

    def reduce_scatter(self, output: Tensor, input: Tensor, op: ReduceOp = "sum") -> _Pending:
        """Write it down."""
        return self._log.issue(self, "reduce_scatter", input)

    def all_gather(self, output: Tensor, input: Tensor) -> _Pending:
        """Write it down."""
        return self._log.issue(self, "all_gather", output)

    def all_to_all(self, output: Tensor, input: Tensor) -> _Pending:
        """Write it down."""
        return self._log.issue(self, "all_to_all", input)

    def broadcast(self, tensor: Tensor, src: int) -> _Pending:
        """Write it down."""
        return self._log.issue(self, "broadcast", tensor)

    def barrier(self) -> None:
        """Return at once."""

    def split(self, groups: Groups) -> _Peers:
        """Some of the ranks."""
        _, ranks = own_group(groups, self.rank)
        return _Peers(len(ranks), ranks.index(self.rank), self._log, uniform_order=self.uniform_order)


class _Pending:
    """A collective that nobody carries out.

    ``gathered``: bytes of weights that were freed before it; ``after``: what is computed when it has been waited for.
    """

    def __init__(self, log: _Log, number: int, gathered: int, after: tuple[Work, ...]) -> None:
        self._log, self._number, self._gathered, self._after = log, number, gathered, after

    def wait(self) -> None:
        """Write it down; weights are on their way no longer."""
        if is_beside():
            return
        self._log.told += [Waited(self._number), *self._after]
        self._after = ()
        if self._gathered:
            self._log.told += [Change("prefetch", -self._gathered), Change("unit_buffers", self._gathered)]
            self._gathered = 0


class _Beside(NoStreams):
    """A GPU's streams, of which one alone matters here: a reduction in two parts has nothing that computes wait."""

    def on(self, lane: Lane, *after: Mark) -> AbstractContextManager[None]:
        """Collectives among the same ranks follow one another; one over replicas is told to follow by a `Waited`."""
        return beside() if lane == "reduce" else super().on(lane, *after)


class _Log(StorageEvents):
    """What the engine does, in order.

    Attributes:
        told: since the last event; storages that come and go by their numbers, until `named` gives them categories.
    """

    def __init__(self) -> None:
        super().__init__(self._comes_or_goes, self._ran)
        self.told: list[EngineAction | tuple[int, int]] = []
        self.levels: Levels | None = None
        self.wires: dict[str, BufferFormats] = {}  # by buffer
        self.has_streams = False
        self.freed: dict[int, torch.UntypedStorage] = {}  # full weights that the engine frees, those that are freed now
        self._whole: dict[int, int] = {}  # and those that are not, with their bytes
        self._number = 0
        self._categories: dict[int, str] = {}
        self._unknown: set[int] = set()

    def issue(self, comm: _Peers, op: str, whole: Tensor) -> _Pending:
        """Write a collective down."""
        self.look_for_freed()
        gathered = self._grown()
        num_bytes = whole.nbytes
        if gathered:
            self.told.append(Change("prefetch", gathered))
        self._number += 1
        label = current_scope()
        control = label == CONTROL
        buffer, phase = (CONTROL, CONTROL) if control else label.rsplit("/", 1)
        assert self.levels is not None
        nodes, replicas = self.levels.nodes, comm is self.levels.replicas and not control
        before, after = self._converted(comm, op, buffer, phase, replicas=replicas)
        replicas = replicas or (nodes is not None and comm is nodes.between)
        if not self.has_streams:
            self.told += before
            before = ()
        message = Message(op, num_bytes, buffer, phase, comm.world_size)
        self.told.append(Sent(self._number, message, replicas, control, before))
        return _Pending(self, self._number, gathered, after)

    def _converted(
        self, comm: _Peers, op: str, buffer: str, phase: str, *, replicas: bool
    ) -> tuple[tuple[Work, ...], tuple[Work, ...]]:
        """What is quantised before a collective, and comes back after it; on the meta device nothing is."""
        wires = self.wires.get(buffer)
        if wires is None:
            return (), ()
        return wires.beside(op, phase, comm.world_size, replicas=replicas)

    def _grown(self) -> int:
        """Bytes of full weights that are not freed any more: a storage that grows tells nobody either."""
        grown = {key: each.nbytes() for key, each in self.freed.items() if key not in self._whole and each.nbytes()}
        self._whole.update(grown)
        return sum(grown.values())

    def look_for_freed(self) -> None:
        """A storage that shrinks tells nobody."""
        for key in [key for key in self._whole if not self.freed[key].nbytes()]:
            self.told.append(Change("unit_buffers", -self._whole.pop(key)))

    def _comes_or_goes(self, storage: int, change: int) -> None:
        self.told.append((storage, change))
        (self._unknown.add if change > 0 else self._unknown.discard)(storage)

    def _ran(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self.look_for_freed()
        work = work_of(func, args, kwargs, result)
        if work is not None:
            self.told.append(work)

    def take(self, units: Sequence[Unit]) -> list[EngineAction | tuple[int, int]]:
        """What was told at the event that is over."""
        self.look_for_freed()
        if self._unknown:
            for holding in holdings(units, (), None):
                self._categories.setdefault(self.number_of(holding.tensor), holding.category)
            self._unknown.clear()
        told, self.told = self.told, []
        return told

    def named(self, told: Sequence[EngineAction | tuple[int, int]]) -> list[EngineAction]:
        """With categories of storages; one that was gone before the event was over is a temporary one."""
        return [
            Change(self._categories.get(each[0], "temporaries"), each[1]) if isinstance(each, tuple) else each
            for each in told
        ]


class _Engine:
    """The engine of a model that is a description, and whoever tells it of events."""

    def __init__(self, names: Sequence[str], buffers: Sequence[Buffer], settings: Settings) -> None:
        self.log = log = _Log()
        self._settings = settings
        num_shards = max((buffer.layout.world_size for buffer in buffers), default=1)
        world = _Peers(num_shards * settings.num_replicas, settings.rank, log, uniform_order=settings.uniform_order)
        near = settings.strategy.secondary_shard_size if num_shards > 1 else None
        nodes = settings.nodes_of(num_shards)
        log.levels = levels = Levels.of(
            world, num_shards if settings.num_replicas > 1 else None, near, nodes, settings.leaves
        )
        groups: dict[str, list[FlatGroup]] = {name: [] for name in ("root", *names)}
        self._grads: dict[str, tuple[FlatGroup, int, Tensor]] = {}
        for buffer in buffers:
            assert buffer.unit in groups, f"a unit that the trace does not know: {buffer.unit}"
            group = _group(buffer, settings, levels)
            groups[buffer.unit].append(group)
            if group.grads.leaf_sum is not None:
                group.grads.leaf_sum.chunk_numel = CHUNK_NUMEL.get(settings.device_type, OTHER_CHUNK_NUMEL)
            compute = settings.precision.compute_dtype(buffer.dtype)
            log.wires[buffer.name] = _wires(buffer, group, settings)
            for index, slot in enumerate(buffer.layout.slots):
                grad = torch.empty(slot.shape, dtype=compute, device="meta")
                self._grads[slot.name] = (group, index, grad)
        looked_up = {buffer.unit for buffer in buffers if not buffer.read_in_backward}
        self._root, *self._units = [
            Unit(name, nn.Module(), members, read_in_backward=name not in looked_up) for name, members in groups.items()
        ]
        self._runtime = Runtime(
            self._root,
            self._units,
            levels,
            settings.strategy,
            settings.prefetch,
            ModuleBuffers(nn.Module(), world, "keep"),
        )
        log.has_streams = settings.device_type == "cuda"
        for group in self._runtime.groups():
            if log.has_streams:
                group.use_streams(_Beside())
            log.ignore([group.params.full, group.params.master, group.params.node_copy.shard])
            log.ignore([] if group.params.common is None else group.params.common.tensors)
            if group.params.shard_params:
                storage = group.params.full.untyped_storage()
                log.freed[storage._cdata] = storage
        log.ignore(grad for _, _, grad in self._grads.values())
        self._waiting_bytes = 0

    def micro_batch(self, events: Sequence[Event], *, sync: bool) -> list[list[EngineAction | tuple[int, int]]]:
        """Tell of a forward and a backward; what the engine does at each event."""
        self._runtime.sync = sync
        turn = next((i for i, event in enumerate(events) if event.name in _IN_BACKWARD), len(events))
        told = [self._hear(event) for event in events[:turn]]

        def backward() -> None:
            told.extend(self._hear(event) for event in events[turn:] if event.name != "backward_over")

        # [Note: Inside autograd]
        _Backward.apply(torch.zeros((), requires_grad=True), backward).backward()
        return [*told, self._take()]

    def _hear(self, event: Event) -> list[EngineAction | tuple[int, int]]:
        runtime = self._runtime
        unit = self._root if event.unit == ROOT else self._units[event.unit]
        if event.name in ("forward_begins", "runs_again"):
            runtime.forward_begins(unit)
        elif event.name == "forward_ends":
            runtime.forward_ends(unit, grads_flow=event.grads_flow, keep=event.keep)
        elif event.name == "backward_begins":
            runtime.backward_begins(unit, runtime.forward_run.index)
        elif event.name == "backward_ends":
            runtime.backward_ends(unit, runtime.forward_run.index)
        elif event.name == "grad":
            runtime.take_grad(*self._grads[event.param if unit is self._root else f"{unit.name}.{event.param}"])
        return self._take()

    def update(self) -> None:
        """An optimizer has stepped, and gradients are cleared."""
        for group in self._runtime.groups():
            if group.trained:
                group.params.mark_stale(copied=self._settings.fused_copies)
        self._runtime.clear_grads()

    def _take(self) -> list[EngineAction | tuple[int, int]]:
        told = self.log.take([self._root, *self._units])
        waiting = sum(group.grads.waiting_bytes for group in self._runtime.groups())
        if waiting != self._waiting_bytes:  # the model has let go of them
            told.append(Change("temporaries", waiting - self._waiting_bytes))
            self._waiting_bytes = waiting
        return told


_IN_BACKWARD = ("backward_begins", "grad", "backward_over")


def _group(buffer: Buffer, settings: Settings, levels: Levels) -> FlatGroup:
    params = [
        (slot.name, nn.Parameter(torch.empty(slot.shape, dtype=buffer.dtype, device="meta"), buffer.trained))
        for slot in buffer.layout.slots
    ]
    return FlatGroup(
        buffer.name,
        params,
        settings.strategy,
        levels,
        settings.precision.exactly() if buffer.exact else settings.precision,
        loaded_later,
        buffer.layout,
        frozen=not buffer.trained,
    )


def _wires(buffer: Buffer, group: FlatGroup, settings: Settings) -> BufferFormats:
    """What of it travels in a format of its own."""
    reduced = buffer.trained and not buffer.exact and settings.strategy.optim is SHARD
    grads = settings.precision.gradients_format(buffer.dtype) if reduced else None
    params = group.params
    compared = settings.device_type == "cpu" and not params.shard_params and params.full.element_size() in (2, 4)
    shards = buffer.layout.own_numel(params.comm.rank), params.comm.world_size
    return BufferFormats(params.wire, grads, *shards, params.full.dtype, params.common is not None, compared)


class _Backward(torch.autograd.Function):
    """The backward of an operation that does nothing else but call ``inside``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, inside: Callable[[], None]) -> Tensor:
        ctx.inside = inside
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.inside()
        return grads[0], None
