"""Memory of the host for one rank's offloaded state: one block of the exact size, page-locked where a GPU copies.

torch's ``pin_memory()`` rounds each block up to a power of two and never gives it back (pytorch issues 150517, 134051):
10.5 GB take 16. So a slab is one anonymous mapping of the size that the tensors in it need, which CUDA is then told to
lock (`cudaHostRegister`). The plan knows the size before the run: the sum of `room` over the tensors.

Only what crosses the bus is worth locking. Locked pages cannot be swapped or moved, and count against limits; fp32
masters and optimizer states never leave the host, so theirs is an ordinary slab, for which the kernel may use huge
pages.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from zeroshard.host import host_memory
from zeroshard.host.errors import UserError
from zeroshard.host.finalizers import Finalizer, settle

ALIGNMENT_BYTES = 64  # a cache line; vector instructions of a CPU want no more
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context of the process


def room(num_bytes: int) -> int:
    """The bytes that a tensor of ``num_bytes`` takes in a slab."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Slab:
    """Host memory of exactly ``num_bytes``, from which tensors are taken; all zeros at first.

    It is given back by `close`, or with the last tensor in it, so nobody has to keep the slab itself. Tensors that are
    still used after `close` stay valid, in pages that are not locked any more.

    Args:
        num_bytes: its size, the sum of `room` over the tensors that will be taken.
        device: the device whose copies it serves. Pages lie on the NUMA node of a GPU, where it can be found.
        pinned: whether to lock its pages; without effect unless ``device`` is a CUDA device.

    Raises:
        UserError: the machine, the process's control group or CUDA does not have the memory.
    """

    def __init__(self, num_bytes: int, *, device: torch.device, pinned: bool) -> None:
        self.num_bytes, self.num_taken = num_bytes, 0
        self.is_pinned = pinned and device.type == "cuda" and num_bytes > 0
        settle()  # memory of dropped ones may be locked yet
        _require(num_bytes)
        try:
            pages = anonymous_pages(max(num_bytes, 1))
        except OSError as error:
            raise _too_large(num_bytes, error.strerror or str(error)) from None
        # Each tensor in it keeps `shown` alive, which so ends with the last one; the mapping only after it is unlocked.
        shown = (ctypes.c_ubyte * len(pages)).from_buffer(pages)
        self._bytes: Tensor | None = torch.frombuffer(shown, dtype=torch.uint8)
        address = self._bytes.data_ptr()
        with host_memory.on_node(host_memory.node_of(device)):
            if device.type == "cuda":  # on the CPU pages come with their first use, by the thread that uses them
                ctypes.memset(address, 0, num_bytes)
            if self.is_pinned:
                _lock(address, num_bytes, device)
        self._unlock = Finalizer(shown, _unlock, pages, address, device) if self.is_pinned else None

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the next ``numel`` elements, ``[numel]``, aligned to `ALIGNMENT_BYTES`."""
        assert self._bytes is not None, "the slab is closed"
        start, end = self.num_taken, self.num_taken + numel * dtype.itemsize
        assert end <= self.num_bytes, f"a slab of {self.num_bytes:,} bytes has no {end - start:,} after {start:,}"
        self.num_taken = min(start + room(end - start), self.num_bytes)
        return self._bytes[start:end].view(dtype)

    def close(self) -> None:
        """Unlock the pages and let go of them; copies to and from them must have ended. May be called twice."""
        if self._unlock is not None:
            self._unlock()
        self._bytes = None


def _require(num_bytes: int) -> None:
    """Raise UserError if the memory is not there now; the kernel would kill the process later."""
    available = host_memory.available_bytes()
    if available is not None and num_bytes > available:
        raise _too_large(num_bytes, f"{_gib(available)} are available on this host")


def _too_large(num_bytes: int, why: str) -> UserError:
    todo = "offload a smaller fraction, use more ranks on more hosts, or keep states on disk"
    return UserError("offload", f"a rank needs {_gib(num_bytes)} of host memory: {why}", todo)


def anonymous_pages(num_bytes: int) -> mmap.mmap:
    """Map pages of the host, huge ones where the kernel has them: fewer page faults, and fewer entries of the TLB.

    A disk that is read past the page cache has less to do as well: a request has a part for each page, and few parts.

    Raises:
        OSError: the process may not have as many.
    """
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _lock(address: int, num_bytes: int, device: torch.device) -> None:
    """Have CUDA lock the pages.

    Raises:
        UserError: it cannot.
    """
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        status = cudart.cudaHostRegister(address, num_bytes, _PORTABLE)
    if int(status) == 0:
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    small = limit != resource.RLIM_INFINITY and limit < num_bytes
    raise UserError(
        "offload.pinned",
        f"CUDA did not page-lock {_gib(num_bytes)} (error {int(status)}, {cudart.cudaGetErrorString(status)})",
        f"raise the limit on locked memory, now {_gib(limit)} (ulimit -l, RLIMIT_MEMLOCK)"
        if small
        else "give a smaller bound of pinned memory, or free memory of this host",
    )


def _unlock(_pages: mmap.mmap, address: int, device: torch.device) -> None:
    """Unlock pages, which are unmapped after that."""
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):  # another thread's device may be one that this rank does not use
        torch.cuda.synchronize()  # a copy may be under way
        cudart.cudaHostUnregister(address)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:,.3f} MiB"
