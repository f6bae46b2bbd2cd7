"""Settings for torch in a process and its children, made before torch is imported: memory, logs, kernels.

They are environment variables; a variable that the user has set keeps its value.

[Note: Memory that stays]
    A step allocates and frees gigabytes. Memory that is returned to the kernel comes back page by page, each page
    cleared after a page fault. Two settings make that rare on a CPU. First, huge pages of 2 MiB: torch asks for them if
    ``THP_MEM_ALLOC_ENABLE`` is set. Second, glibc's malloc keeps freed memory, as torch's caching allocator for GPUs
    does; by default it returns the end of its heap as soon as a few blocks there are free. Together they remove tens of
    thousands of page faults from a step at stage 3, and the peak resident set stays the same (``zeroshard bench step``,
    ``benchmarks/claims/footprint.py``). Blocks of 32 MiB and more are still mapped each time, because freed aligned
    blocks seldom fit again in the heap.
    On a GPU, segments that grow (``expandable_segments``) let units and gradients of different sizes reuse each other's
    freed memory; segments of a fixed size leave gaps.
"""

from __future__ import annotations

import ctypes
import os
import sys

# variable -> (option of `mallopt`, bytes). Trim: bytes that may be free at the heap's end before they are returned to
# the kernel. Mmap: blocks of this size and more are mapped one by one; malloc would raise it itself to at most this.
_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30), "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20)}
_TUNABLES = "GLIBC_TUNABLES"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"  # its older name, which torch still reads


def prepare_torch() -> None:
    """Set up memory and logging for torch; call it before torch is imported.

    Large CPU tensors get huge pages, and freed memory stays with the process; GPU memory is allocated in segments that
    grow, unless a variable for torch's allocator is set: [Note: Memory that stays]. Torch logs errors only: if a rank
    is lost, torch would warn with C++ stack traces of each peer's connection, where our one line names the rank. Its
    profiler would log each start and stop.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    if ALLOCATOR_BEFORE not in os.environ:
        os.environ.setdefault(ALLOCATOR, "expandable_segments:True")
    _keep_freed_memory()


def num_cpus() -> int:
    """Logical CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allocator_settings() -> str:
    """The settings of torch's GPU allocator in the environment; empty if there are none."""
    return os.environ.get(ALLOCATOR) or os.environ.get(ALLOCATOR_BEFORE, "")


def _keep_freed_memory() -> None:
    """Set both malloc thresholds, or neither if the user has set one.

    Setting one alone would stop malloc's automatic adjustment of the other: with the trim threshold alone, every
    tensor would be mapped.
    """
    spoken = any(name in os.environ for name in _THRESHOLDS) or "malloc" in os.environ.get(_TUNABLES, "")
    if spoken or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has no mallopt
        return
    for name, (option, num_bytes) in _THRESHOLDS.items():
        mallopt(option, num_bytes)  # for this process, whose malloc has read the environment already
        os.environ[name] = str(num_bytes)  # for child processes
