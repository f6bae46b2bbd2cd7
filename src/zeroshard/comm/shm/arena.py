"""Tensors that other ranks of the host read where they lie: an allocator over the ranks' segments.

`Arena.empty` cuts tensors from this rank's segment. A `Place` says where one lies there, in numbers that another
process understands, and `Neighbour.view` shows that process the same memory. So a collective over such tensors needs
no copy into a slot: it adds straight from the tensors of others.

Memory of a tensor that is gone serves the next tensor of the same size. It goes back to the system with the arena.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.shm.mapped import Segment

_EXTENT_BYTES = 256 << 20  # of the file, mapped at a time; pages are only there once a tensor needs them
_ALIGNMENT = 4096


class Place(NamedTuple):
    """Where a tensor lies in its rank's segment: an extent of the file, and the byte in it."""

    start: int
    num_bytes: int
    offset: int


class _Extent(NamedTuple):
    address: int
    start: int
    num_bytes: int
    memory: mmap.mmap


class Arena:
    """Allocates in this rank's segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents: list[_Extent] = []  # by address
        self._newest: _Extent | None = None
        self._used = 0  # bytes of the newest
        self._free: dict[int, list[tuple[_Extent, int]]] = {}  # by size
        self._full = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]``, not filled, for other ranks to read; ordinary memory once there is no room for more."""
        num_bytes = -(-numel * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        free = self._free.setdefault(num_bytes, [])
        if not num_bytes or (not free and self._full):
            return torch.empty(numel, dtype=dtype)
        try:
            extent, offset = free.pop() if free else self._cut(num_bytes)
        except OSError:
            self._full = True
            return torch.empty(numel, dtype=dtype)
        lease = _lease_type(num_bytes).from_buffer(extent.memory, offset)
        weakref.finalize(lease, free.append, (extent, offset)).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=numel)

    def place_of(self, tensor: Tensor) -> Place | None:
        """Where a contiguous tensor lies; None if it was not cut from here."""
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._extents, address, key=lambda extent: extent.address) - 1
        if index < 0:
            return None
        extent = self._extents[index]
        offset = address - extent.address
        inside = offset + tensor.nbytes <= extent.num_bytes
        return Place(extent.start, extent.num_bytes, offset) if inside else None

    def _cut(self, num_bytes: int) -> tuple[_Extent, int]:
        if self._newest is None or self._used + num_bytes > self._newest.num_bytes:
            size = max(num_bytes, _EXTENT_BYTES)
            start, memory = self._segment.extend(size)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            self._newest, self._used = _Extent(address, start, size, memory), 0
            bisect.insort(self._extents, self._newest, key=lambda extent: extent.address)
        extent, offset = self._newest, self._used
        self._segment.reserve(extent.start + offset, num_bytes)
        self._used += num_bytes
        return extent, offset


class Neighbour:
    """What another rank's arena holds, as seen from here."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents: dict[int, Tensor] = {}

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """``[numel]`` at ``place``: the other rank's memory itself."""
        extent = self._extents.get(place.start)
        if extent is None:
            memory = self._segment.map(place.start, place.num_bytes)
            extent = self._extents[place.start] = torch.frombuffer(memory, dtype=torch.uint8)
        return extent[place.offset : place.offset + numel * dtype.itemsize].view(dtype)


_lease_types: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}


def _lease_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """A buffer whose end can be told: a subclass, for plain ctypes arrays take no weak references."""
    kind = _lease_types.get(num_bytes)
    if kind is None:
        kind = _lease_types[num_bytes] = type("Lease", (ctypes.c_char * num_bytes,), {})
    return kind
