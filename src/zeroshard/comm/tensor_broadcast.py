"""Broadcasts of full tensors, and gathers of values to one rank: few large collectives, several in flight.

Everything is sent as bytes, so tensors of any dtype share a collective and every communicator supports it.
"""

from __future__ import annotations

import io
import json
import re
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from zeroshard.comm import Communicator, Work, labelled
from zeroshard.comm.agree import send_bytes

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
        with labelled(self._label):
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


def broadcast_dicts(
    comm: Communicator, mine: list[dict[str, Any]], src: int, device: torch.device, label: str
) -> list[dict[str, Any]]:
    """Return rank ``src``'s dicts of dense tensors and plain numbers, on every rank. Collective.

    Args:
        comm: the ranks that take part.
        mine: the dicts, on rank ``src``; elsewhere it is ignored.
        device: where ``comm`` communicates. A tensor that lies elsewhere (a step count on the CPU) goes through it.
        label: the label of the broadcasts, for observers.

    Raises:
        ValueError: on rank ``src``, for a value that cannot be sent.
    """
    description = json.loads(send_bytes(comm, json.dumps([describe(each) for each in mine]).encode(), src))
    received = mine if comm.rank == src else [_empty(facts) for facts in description]
    pending = PendingBroadcasts(comm, label)
    homes: list[tuple[dict[str, Any], str, Tensor]] = []
    for each in received:
        for kind, value in each.items():
            if isinstance(value, Tensor):
                there = value.to(device).contiguous()
                pending.issue([there], src)
                homes.append((each, kind, there))
    pending.wait()
    for each, kind, there in homes:
        if comm.rank != src:
            each[kind] = there.to(each[kind].device)
    return received


def describe(values: dict[str, Any]) -> list[tuple[str, Any]]:
    """Describe a dict, so that other ranks can receive it; ValueError for what cannot be sent."""
    return [(kind, _facts(kind, value)) for kind, value in values.items()]


def _facts(kind: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.layout is torch.strided and not hasattr(value, "__tensor_flatten__"):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), value.device.type]
    if value is None or isinstance(value, bool | int | float):
        return value
    raise ValueError(
        f"{kind}: a {type(value).__name__} in an optimizer's state cannot be sent; keep dense tensors or numbers"
    )


def _empty(description: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a dict with uninitialised tensors of the described dtypes and shapes; numbers are final already."""
    return {
        kind: torch.empty(facts[1], dtype=getattr(torch, facts[0]), device=facts[2])
        if isinstance(facts, list)
        else facts
        for kind, facts in description
    }


# Classes beside those of torch's own list that a received value may hold; none of them runs code of the sender's.
_PLAIN: list[Any] = [bytearray, complex, frozenset, range, set, slice]
_LOADING = threading.Lock()  # torch's list of them is one for all threads


def gather_to(comm: Communicator, value: Any, to: int, bucket_bytes: int) -> list[Any]:
    """Return every rank's ``value`` on rank ``to``, by rank, with tensors on the CPU; elsewhere []. Collective.

    A value may nest tensors in plain values and Python's own containers. `torch.save` makes bytes of it, which are
    broadcast ``bucket_bytes`` at a time: a communicator has no gather to one rank, so the others receive each bucket
    too and drop it. `torch.load` with ``weights_only`` creates no object of any other class and calls nothing.

    Raises:
        RuntimeError: on every rank, if some rank's value holds anything else.
    """
    values = []
    for src in range(comm.world_size):
        content, failure = b"", None
        if comm.rank == src:
            try:
                content = _saved(value)
            except Exception as error:  # noqa: BLE001 -- raised below, once other ranks know
                failure = error
        num_bytes = int(send_bytes(comm, str(len(content)).encode(), src))
        if not num_bytes:
            what = f"the values that rank {src} holds cannot be sent"
            todo = "keep tensors, plain values, lists and dicts in an optimizer's state"
            raise RuntimeError(f"{what}: {_reason(failure)}; {todo}") from failure
        if src != to:
            content = _streamed(comm, content, num_bytes, src, to, bucket_bytes)
        if comm.rank == to:
            values.append(_loaded(content, "cpu"))
    return values


def _saved(value: Any) -> bytes:
    """``value`` as bytes, which receivers will be able to load: found out here, without its tensors' elements."""
    file = io.BytesIO()
    torch.save(value, file)
    content = file.getvalue()
    _loaded(content, "meta")
    return content


def _reason(failure: Exception | None) -> str:
    """Why a value cannot be sent, in a few words: torch's own message is a page of advice."""
    if failure is None:
        return "see there"
    found = re.search(
        r"Unsupported (?:global|operand|class)\W+(?:GLOBAL )?([\w.]+)|but got <class '([\w.]+)'>", str(failure)
    )
    return f"it holds {found[1] or found[2]}" if found else " ".join(str(failure).split())[:200]


def _loaded(content: bytes, device: str) -> Any:
    with _LOADING, torch.serialization.safe_globals(_PLAIN):
        return torch.load(io.BytesIO(content), map_location=device, weights_only=True)


def _streamed(comm: Communicator, content: bytes, num_bytes: int, src: int, to: int, bucket_bytes: int) -> bytes:
    """Return rank ``src``'s ``content`` on rank ``to``; elsewhere b"". Collective."""
    received = bytearray()
    for start in range(0, num_bytes, bucket_bytes):
        stop = min(start + bucket_bytes, num_bytes)
        bucket = torch.empty(stop - start, dtype=torch.uint8, device=comm.control_device)
        if comm.rank == src:
            bucket.copy_(torch.frombuffer(bytearray(content[start:stop]), dtype=torch.uint8))
        with labelled("state"):
            comm.broadcast(bucket, src).wait()
        if comm.rank == to:
            received += bucket.cpu().numpy().tobytes()
    return bytes(received)
