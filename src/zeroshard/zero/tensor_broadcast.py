"""Broadcasts of full tensors, and gathers of values to one rank: few large collectives, several in flight.

Everything is sent as bytes, so tensors of any dtype share a collective and every communicator supports it.
"""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.comm import CONTROL, Communicator, Work, scope

MAX_PENDING_BROADCASTS = 4  # each keeps a bucket; two suffice on two ranks, but more ranks take turns as the source


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` in order, as uint8 [numel * itemsize]: a view if contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def put_bytes(tensor: Tensor, content: Tensor) -> None:
    """Write bytes from `as_bytes` into ``tensor``. Autograd sees the tensor change, as if an optimizer changed it."""
    if tensor.is_contiguous():
        as_bytes(tensor).copy_(content)
    else:
        tensor.detach().copy_(content.clone().view(tensor.dtype).view(tensor.shape))  # cloned: aligned for its dtype


@dataclass
class _Broadcast:
    work: Work
    buffer: Tensor
    tensors: Sequence[Tensor]
    src: int
    in_place: bool


class PendingBroadcasts:
    """Broadcasts in flight, at most `MAX_PENDING_BROADCASTS`; every rank must issue the same ones in the same order.

    Args:
        comm: the ranks that take part.
        label: the `scope` of the broadcasts, for observers.
    """

    def __init__(self, comm: Communicator, label: str) -> None:
        self._comm = comm
        self._label = label
        self._issued: deque[_Broadcast] = deque()

    def issue(self, tensors: Sequence[Tensor], src: int) -> None:
        """Issue a broadcast of rank ``src``'s ``tensors``, all on one device. Do not change them until `wait`.

        A single contiguous tensor is broadcast in place; otherwise a buffer for all bytes is allocated.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if self._comm.world_size == 1 or num_bytes == 0:
            return
        if len(self._issued) == MAX_PENDING_BROADCASTS:
            self._wait_oldest()
        in_place = len(tensors) == 1 and tensors[0].is_contiguous()
        if in_place:
            buffer = as_bytes(tensors[0])
        elif self._comm.rank == src:
            buffer = torch.cat([as_bytes(tensor) for tensor in tensors])
        else:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=tensors[0].device)
        with scope(self._label):
            work = self._comm.broadcast(buffer, src)
        self._issued.append(_Broadcast(work, buffer, tensors, src, in_place))

    def wait(self) -> None:
        """Wait for all broadcasts, and copy the received bytes into the tensors."""
        while self._issued:
            self._wait_oldest()

    def _wait_oldest(self) -> None:
        oldest = self._issued.popleft()
        oldest.work.wait()
        if oldest.src == self._comm.rank:
            return
        if oldest.in_place:
            increment_version(oldest.tensors[0])
            return
        contents = oldest.buffer.split([tensor.nbytes for tensor in oldest.tensors])
        for tensor, content in zip(oldest.tensors, contents, strict=True):
            put_bytes(tensor, content)


def send_bytes(comm: Communicator, content: bytes, src: int) -> bytes:
    """Return rank ``src``'s ``content`` on every rank; the argument of other ranks is ignored. Collective."""
    with scope(CONTROL):
        size = torch.tensor([len(content)], device=comm.control_device)
        comm.broadcast(size, src).wait()
        num_bytes = int(size)
        if comm.rank == src:
            message = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(0)
            message = message.to(comm.control_device)
        else:
            message = torch.empty(num_bytes, dtype=torch.uint8, device=comm.control_device)
        if num_bytes:
            comm.broadcast(message, src).wait()
    return content if comm.rank == src else message.cpu().numpy().tobytes()


def gather_to(comm: Communicator, value: Any, to: int, bucket_bytes: int) -> list[Any]:
    """Return every rank's ``value`` on rank ``to``, by rank, with tensors on the CPU; elsewhere []. Collective.

    A value may nest tensors in plain values and Python's own containers. Its tensors are broadcast in buckets of
    ``bucket_bytes``, which is the extra memory on each rank. A communicator has no gather to one rank, so the others
    receive each bucket too and drop it.

    Unpickling creates no object of any other class and calls nothing (`_Unpickler`), whoever has sent the bytes.

    Raises:
        RuntimeError: on every rank, if some rank's value holds anything else.
    """
    values = []
    for src in range(comm.world_size):
        tensors: list[Tensor] = []
        skeleton, failure = b"", None
        if comm.rank == src:
            try:
                skeleton = _dump(value, tensors)
            except Exception as error:  # noqa: BLE001 -- raised below, once other ranks know
                failure = error
        skeleton = send_bytes(comm, skeleton, src)
        if not skeleton:
            what = f"the values that rank {src} holds cannot be sent"
            todo = "keep tensors, plain values, lists and dicts in an optimizer's state"
            raise RuntimeError(f"{what}: {failure or 'see there'}; {todo}") from failure
        sizes, skeleton = _Unpickler(io.BytesIO(skeleton), []).load()
        if src == to:
            contents = [as_bytes(tensor).to("cpu", copy=True) for tensor in tensors]
        elif comm.rank == src:
            contents = [as_bytes(tensor) for tensor in tensors]
        else:
            contents = [torch.empty(size, dtype=torch.uint8) for size in sizes] if comm.rank == to else []
        if src != to:
            _stream(comm, src, sizes, contents, bucket_bytes)
        if comm.rank == to:
            values.append(_load(skeleton, contents))
    return values


def _stream(comm: Communicator, src: int, sizes: list[int], ends: list[Tensor], bucket_bytes: int) -> None:
    """Copy rank ``src``'s byte tensors ``ends`` into the receiver's; ``ends`` is empty on ranks that only take part."""
    for message in cut(sizes, bucket_bytes):
        buffer = torch.empty(sum(b - a for _, a, b in message), dtype=torch.uint8, device=comm.control_device)
        places = buffer.split([b - a for _, a, b in message])
        if comm.rank == src:
            for place, (index, start, stop) in zip(places, message, strict=True):
                place.copy_(ends[index][start:stop])
        with scope("state"):
            comm.broadcast(buffer, src).wait()
        if ends and comm.rank != src:
            for place, (index, start, stop) in zip(places, message, strict=True):
                ends[index][start:stop].copy_(place)


def cut(sizes: Sequence[int], limit: int) -> Iterator[list[tuple[int, int, int]]]:
    """Yield buckets of ``limit`` bytes (the last: fewer) over tensors of ``sizes``, as (index, start, stop)s."""
    message: list[tuple[int, int, int]] = []
    room = limit
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            message.append((index, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield message
                message, room = [], limit
    if message:
        yield message


_ALLOWED = {
    "builtins": frozenset({"bytearray", "complex", "frozenset", "range", "set", "slice"}),
    "collections": frozenset({"Counter", "OrderedDict", "defaultdict", "deque"}),
    "torch": frozenset({"Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch._utils": frozenset(
        {"_rebuild_parameter", "_rebuild_qtensor", "_rebuild_sparse_tensor", "_rebuild_tensor", "_rebuild_tensor_v2"}
    ),
}  # globals that a pickle may refer to, by module; torch's dtypes are allowed too


def _tensor_bytes(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), weights_only=True)


class _Pickler(pickle.Pickler):
    """Moves plain tensors from the pickle to a list; other tensors (sparse, subclasses) are pickled as usual."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> tuple[Any, ...] | None:
        """Return a plain tensor's index in the list, with its dtype, shape and stride; None for any other object."""
        if type(obj) not in (Tensor, torch.nn.Parameter) or obj.layout != torch.strided or obj.is_quantized:
            return None
        self._tensors.append(obj)
        return len(self._tensors) - 1, obj.dtype, tuple(obj.shape), obj.stride()


class _Unpickler(pickle.Unpickler):
    """Inserts the tensors, on the CPU, with their original strides: fused kernels need those of a state's weight.

    A pickle may call anything that can be imported. This one comes from another process, so it may create only
    containers, and tensors that torch builds from bytes without calling anything (``weights_only``).
    """

    def __init__(self, file: io.BytesIO, contents: list[Tensor]) -> None:
        super().__init__(file)
        self._contents = contents

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return the global of that name, if a pickle may refer to it.

        Raises:
            UnpicklingError: it may not.
        """
        if (module_name, global_name) == ("torch.storage", "_load_from_bytes"):
            return _tensor_bytes
        allowed = global_name in _ALLOWED.get(module_name, ())
        if not allowed and not (module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)):
            raise pickle.UnpicklingError(f"it holds {module_name}.{global_name}")
        return super().find_class(module_name, global_name)

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the tensor whose bytes have the index ``pid[0]``."""
        index, dtype, shape, stride = pid
        found = self._contents[index].view(dtype).view(shape)
        return found if found.stride() == stride else torch.empty_strided(shape, stride, dtype=dtype).copy_(found)


class _Rehearsal(_Unpickler):
    """Unpickles on the sender, with its own tensors, to find out whether receivers will be able to."""

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the sender's own tensor."""
        return self._contents[pid[0]]


def _dump(value: Any, tensors: list[Tensor]) -> bytes:
    """Pickle ``value`` and the byte sizes of its tensors; the tensors are appended to ``tensors`` instead."""
    file = io.BytesIO()
    _Pickler(file, tensors).dump(value)
    _Rehearsal(io.BytesIO(file.getvalue()), tensors).load()  # fail here, on the sender, so that all ranks raise
    return pickle.dumps(([tensor.nbytes for tensor in tensors], file.getvalue()))


def _load(skeleton: bytes, contents: list[Tensor]) -> Any:
    return _Unpickler(io.BytesIO(skeleton), contents).load()
