"""An allocator in shared memory: tensors that other ranks of the host can read in place.

`Arena.empty` allocates tensors in this rank's segment. A `Place` says where a tensor lies in the segment, in numbers
that are valid in every process, and `MappedArena.view` returns a tensor over the same memory in another process. So a
collective over such tensors needs no copy into a slot: it reads the tensors of other ranks directly.

The memory of a tensor that was freed is reused for the next tensor of the same size. It is returned to the system when
the arena is freed.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zeroshard.comm.shm.mapped import Segment

_EXTENT_BYTES = 256 << 20  # of the file, mapped at a time; pages are allocated only when a tensor needs them
_ALIGNMENT = 4096
_MOST_VIEWS = 4096  # of other ranks' tensors that are remembered


class Place(NamedTuple):
    """Where a tensor lies in its rank's segment: an extent (start and length in the file), and the offset in it."""

    start: int
    num_bytes: int
    offset: int


class _Extent(NamedTuple):
    address: int
    start: int
    num_bytes: int
    memory: mmap.mmap


class Arena:
    """Allocates tensors in this rank's segment."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents: list[_Extent] = []  # by address
        self._newest: _Extent | None = None
        self._used = 0  # bytes of the newest extent that are allocated
        self._free: dict[int, list[tuple[_Extent, int]]] = {}  # extent and offset of freed memory, by its size
        self._leases: dict[int, weakref.ref[Any]] = {}  # address of an allocated tensor -> of its memory's owner
        self._full = False

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised ``[numel]`` that other ranks can read; ordinary memory once the segment is full."""
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
        address = extent.address + offset

        def reuse(_: object) -> None:
            del self._leases[address]  # first: once it is free, another thread may lease it
            free.append((extent, offset))

        self._leases[address] = weakref.ref(lease, reuse)
        return torch.frombuffer(lease, dtype=dtype, count=numel)

    def place_of(self, tensor: Tensor) -> Place | None:
        """Return where a contiguous tensor lies; None if it was not allocated in this arena."""
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


class MappedArena:
    """Another rank's arena, as this process maps it."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._extents: dict[int, Tensor] = {}
        self._views: dict[tuple[Place, int, torch.dtype], Tensor] = {}

    def view(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the tensor ``[numel]`` at ``place``: a view of the other rank's memory, not a copy."""
        found = self._views.get((place, numel, dtype))
        if found is None:
            if len(self._views) == _MOST_VIEWS:
                self._views.clear()
            found = self._views[place, numel, dtype] = self._view(place, numel, dtype)
        return found

    def _view(self, place: Place, numel: int, dtype: torch.dtype) -> Tensor:
        extent = self._extents.get(place.start)
        if extent is None:
            memory = self._segment.map(place.start, place.num_bytes)
            extent = self._extents[place.start] = torch.frombuffer(memory, dtype=torch.uint8)
        return extent[place.offset : place.offset + numel * dtype.itemsize].view(dtype)


_lease_types: dict[int, type[ctypes.Array[ctypes.c_char]]] = {}


def _lease_type(num_bytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return a ctypes array type that takes weak references, which plain ones do not: we must see when it is freed."""
    kind = _lease_types.get(num_bytes)
    if kind is None:
        kind = _lease_types[num_bytes] = type("Lease", (ctypes.c_char * num_bytes,), {})
    return kind
