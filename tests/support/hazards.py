"""A GPU that computes nothing and forgets nothing: streams, events and reused memory, and who may touch what when.

The real engine runs on CPU tensors, through `DeviceStreams` over this module in the place of ``torch.cuda``. Every
operation is written down as one of the stream that is current, every collective as one of the stream of its group, as
NCCL has it. What is ordered before what is told by vector clocks (Mattern 1989; a race is found as in FastTrack,
Flanagan and Freund 2009, https://doi.org/10.1145/1542476.1542490): two accesses to a storage, one of them a write, must
be ordered by a stream or by events, whatever the host did first. Memory that is freed may be taken again by the stream
that it came from at once, as by CUDA's caching allocator: whoever touches new memory must come after all that touched
what was freed in that pool before.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroshard.comm import NullCommunicator, current_label, streams
from zeroshard.comm.base import DONE, own_group
from zeroshard.zero.frozen_formats import coded
from zeroshard.zero.transport import wire


class Hazard(AssertionError):
    """Two accesses to memory that nothing orders."""


class _Stream:
    """One queue of a device; ``clock``: of each stream, how much of it is over before what is queued here next."""

    def __init__(self, device: Any, name: str) -> None:
        self._device, self.name = device, name
        self.clock: Counter[str] = Counter()

    def wait_event(self, event: _Event) -> None:
        self._device.poll()
        self.clock |= event.clock

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


class _Event:
    def __init__(self, device: Any) -> None:
        self._device = device
        self.clock: Counter[str] = Counter()

    def record(self, stream: _Stream | None = None) -> None:
        self._device.poll()
        self.clock = Counter((stream or self._device.current).clock)

    def synchronize(self) -> None:
        """The host waits: what it does from now on comes after."""
        self._device.poll()
        self._device.host.clock |= self.clock


class _Access(NamedTuple):
    """When and by whom some bytes of a storage were touched; a later one of the same bytes takes its place."""

    stream: str
    time: int
    what: str
    span: tuple[int, int]
    writes: bool


class _Memory:
    """A storage: from which pool, after what, and who has touched it."""

    def __init__(self, pool: str, born: Counter[str]) -> None:
        self.pool, self.born = pool, born
        self.accesses: list[_Access] = []
        self.touched: Counter[str] = Counter(born)
        self.recorded: set[str] = set()

    def add(self, new: _Access) -> None:
        def is_gone(old: _Access) -> bool:
            inside = new.span[0] <= old.span[0] and old.span[1] <= new.span[1]
            return inside and (new.writes or (not old.writes and old.stream == new.stream))

        self.accesses = [old for old in self.accesses if not is_gone(old)]
        self.accesses.append(new)
        self.touched[new.stream] = new.time


class HazardDevice(TorchDispatchMode):
    """See the module's docstring; what is done inside of the block is seen.

    Attributes:
        begun: of each collective its name and label, what its stream then waits for, and what the computing stream has
            waited for: how much of each stream is over.
    """

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[str, _Stream] = {}
        self.compute = self.current = self.new_stream("compute")
        self.host = self.new_stream("host")
        self.begun: list[tuple[str, Counter[str], Counter[str]]] = []
        self._memory: dict[int, _Memory] = {}
        self._alive: dict[int, Any] = {}
        self._resized: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._freed: dict[str, Counter[str]] = {}  # by pool

    # -- what `DeviceStreams` takes for ``torch.cuda`` --------------------------------------------------------

    def new_stream(self, name: str) -> _Stream:
        stream = _Stream(self, f"{name}{len(self._streams)}" if name in self._streams else name)
        self._streams[stream.name] = stream
        return stream

    def Stream(self, device: Any = None, priority: int = 0) -> _Stream:
        return self.new_stream("lane")

    def Event(self) -> _Event:
        return _Event(self)

    def current_stream(self, device: Any = None) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream):
        self.poll()
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.poll()
            self.current = before

    # -- memory -----------------------------------------------------------------------------------------------

    def watch(self, zero: Any) -> None:
        """The engine's full weights are freed and come back where no operation tells."""
        for group in zero._runtime.groups():
            storage = group.params.full.untyped_storage()
            self._resized[storage._cdata] = (storage, storage.nbytes())

    def poll(self) -> None:
        for key, (storage, before) in self._resized.items():
            now = storage.nbytes()
            if before == now:
                continue
            self._resized[key] = (storage, now)
            if now == 0:
                self._retire(key)
            else:
                self._memory[key] = self._taken()

    def _taken(self) -> _Memory:
        pool = self.current.name
        return _Memory(pool, Counter(self._freed.get(pool, ())))

    def _retire(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is not None:  # the allocator waits for streams that were recorded, and so for what these waited for
            seen: Counter[str] = Counter()
            for name in memory.recorded:
                seen |= self._streams[name].clock
            left = Counter({name: time for name, time in memory.touched.items() if time > seen[name]})
            self._freed[memory.pool] = self._freed.get(memory.pool, Counter()) | left

    def record_stream(self, tensor: Tensor) -> None:
        """As `torch.Tensor.record_stream` of the current stream."""
        self._of(tensor).recorded.add(self.current.name)

    def _of(self, tensor: Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            self._memory[key] = self._taken()
            if key not in self._resized and key not in self._alive:

                def gone(_: Any) -> None:
                    self._alive.pop(key, None)
                    self._retire(key)

                self._alive[key] = weakref.ref(storage, gone)
        return self._memory[key]

    def access(self, stream: _Stream, what: str, reads: Any = (), writes: Any = ()) -> None:
        """Queue one operation on ``stream``."""
        now = stream.tick()
        touched = [(tensor, writing) for tensors, writing in ((reads, False), (writes, True)) for tensor in tensors]
        new = [(self._of(t), _Access(stream.name, now, what, _span(t), writing)) for t, writing in touched]
        for memory, access in new:
            self._check(memory, stream, access)
        for memory, access in new:
            memory.add(access)

    def _check(self, memory: _Memory, stream: _Stream, new: _Access) -> None:
        if any(stream.clock[name] < time for name, time in memory.born.items()):
            raise Hazard(f"{new.what} on {new.stream} uses memory of {memory.pool} that others still used")
        for old in memory.accesses:
            apart = old.span[1] <= new.span[0] or new.span[1] <= old.span[0]
            if (new.writes or old.writes) and not apart and stream.clock[old.stream] < old.time:
                raise Hazard(f"{new.what} on {new.stream} does not wait for {old.what} on {old.stream}")

    # -- operations -------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.poll()
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name, touches, arguments = _operation(func)
        if not touches:
            return result
        reads, writes = [], []
        for place, (argument, is_written) in enumerate(arguments):
            value = args[place] if place < len(args) else kwargs.get(argument)
            (writes if is_written else reads).extend(_tensors(value))
        made = _tensors(result)
        for tensor in made:
            self._of(tensor)
        written = writes if "empty" in name else [*writes, *made]
        self.access(self.current, name, [t for t in reads if t.numel()], written)
        return result


@functools.cache
def _operation(func: Any) -> tuple[str, bool, list[tuple[str, bool]]]:
    """Its name, whether it touches memory, and of each argument the name and whether it is written to."""
    schema = func._schema
    # a view; a question about the tensor, such as its device
    views = any(returned.alias_info is not None and not returned.alias_info.is_write for returned in schema.returns)
    written = [(each.name, each.alias_info is not None and each.alias_info.is_write) for each in schema.arguments]
    return str(func), not views and func.namespace != "prim", written


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage that a tensor lies in."""
    numel, start, itemsize = tensor.numel(), tensor.storage_offset(), tensor.itemsize
    if not numel:
        return 0, 0
    if not tensor.is_contiguous():
        numel = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * itemsize, (start + numel) * itemsize


def _tensors(value: Any) -> list[Tensor]:
    if value is None or isinstance(value, int | float | str):
        return []
    plain = (Tensor, torch.nn.Parameter)
    leaves = [value] if type(value) in plain else tree_leaves(value)
    return [leaf for leaf in leaves if type(leaf) in plain and leaf.layout == torch.strided]


def _in_place(whole: Tensor, part: Tensor) -> bool:
    """Whether a rank's shard lies in what is gathered: NCCL writes the others' alone then."""
    return whole.untyped_storage()._cdata == part.untyped_storage()._cdata


class _Work:
    """As NCCL's: it keeps its tensors until somebody has waited."""

    def __init__(self, device: HazardDevice, clock: Counter[str], tensors: Any) -> None:
        self._device, self._clock, self._tensors = device, clock, tensors

    def wait(self) -> None:
        self._device.poll()
        self._device.current.clock |= self._clock
        self._tensors = ()


class HazardCommunicator(NullCommunicator):
    """Rank ``rank`` of ``world_size``, whose collectives run on a stream of their own; ``inline``: on the caller's."""

    uniform_order = False

    def __init__(self, device: HazardDevice, world_size: int, rank: int = 0, *, inline: bool = False) -> None:
        super().__init__(world_size, rank)
        self._device, self._inline = device, inline
        self.stream = device.new_stream("group")

    def _queued(self, what: str, reads: Any, writes: Any, run: Any) -> Any:
        device, label = self._device, f"{what} {current_label()}"
        device.poll()
        stream = device.current if self._inline else self.stream
        stream.clock |= device.current.clock
        device.begun.append((label, Counter(stream.clock), Counter(device.compute.clock)))
        device.access(stream, label, reads, writes)
        with torch._C._DisableTorchDispatch():
            run()
        return DONE if self._inline else _Work(device, Counter(stream.clock), (*reads, *writes))

    def all_reduce(self, tensor: Tensor, op: Any = "sum") -> Any:
        return self._queued("all_reduce", [tensor], [tensor], lambda: NullCommunicator.all_reduce(self, tensor, op))

    def reduce_scatter(self, output: Tensor, input: Tensor, op: Any = "sum") -> Any:
        whole = NullCommunicator(self.world_size, self.rank)
        return self._queued("reduce_scatter", [input], [output], lambda: whole.reduce_scatter(output, input, op))

    def all_gather(self, output: Tensor, input: Tensor) -> Any:
        whole = NullCommunicator(self.world_size, self.rank)
        filled, own = output.view(-1), self.rank * input.numel()
        writes = [filled[:own], filled[own + input.numel() :]] if _in_place(output, input) else [output]
        return self._queued("all_gather", [input], writes, lambda: whole.all_gather(output, input))

    def all_to_all(self, output: Tensor, input: Tensor) -> Any:
        whole = NullCommunicator(self.world_size, self.rank)
        return self._queued("all_to_all", [input], [output], lambda: whole.all_to_all(output, input))

    def broadcast(self, tensor: Tensor, src: int) -> Any:
        return self._queued("broadcast", [tensor], [tensor], lambda: None)

    def split(self, groups: Any) -> HazardCommunicator:
        _, ranks = own_group(groups, self.rank)
        return HazardCommunicator(self._device, len(ranks), ranks.index(self.rank), inline=self._inline)


def on_device(monkeypatch: Any, device: HazardDevice) -> None:
    """Have engines take this device's streams for CPU tensors."""
    made = streams.DeviceStreams(torch.device("cpu"), device)
    monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key: made)
    for module in (wire, coded):
        monkeypatch.setattr(module, "record_read", device.record_stream)
        for name, (reads, writes) in KERNELS.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, _told(device, name, getattr(module, name), reads, writes))


# The references run past a dispatch mode, by whole tensors, as kernels do: which arguments each reads and writes.
KERNELS = {"quantise": ((0,), (1,)), "dequantise": ((0,), (1,)), "dequantised_sum": ((0, 1), (3,))}


def _told(device: HazardDevice, name: str, whole: Any, reads: Any, writes: Any) -> Any:
    def kernel(*args: Any) -> None:
        device.access(device.current, name, [args[place] for place in reads], [args[place] for place in writes])
        whole(*args)

    return kernel
