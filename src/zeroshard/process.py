"""What a process that trains, and those started from it, are told before torch comes: memory, logs, kernels.

All of it by the environment, so whoever has set a variable keeps it.

[Note: Memory that stays]
    A step allocates and frees gigabytes, and what the kernel takes back it hands out anew page by page, cleared. Two
    things make that rare on a CPU. Pages of 2 MiB: torch asks for them where ``THP_MEM_ALLOC_ENABLE`` is set. And
    glibc's malloc keeping what was freed, as torch's allocator for GPUs does: of itself it gives the end of its heap
    back as soon as a few blocks there are free. So a step at stage 3 meets no page fault where it met tens of
    thousands, and the peak of the resident set is what it was (``benchmarks/step.py``, ``benchmarks/footprint.py``).
    Blocks of 32 MiB and more are mapped each time, as ever: in the heap, freed aligned blocks seldom fit again.
    On a GPU segments that grow (``expandable_segments``) keep what units and gradients of several sizes give back
    usable for each other; segments of a fixed size leave gaps.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# By variable: what `mallopt` calls it, and the bytes. So much may be free at the heap's end; a block of so much is no
# longer cut from the heap, which is as far as malloc would move by itself.
_THRESHOLDS = {"MALLOC_TRIM_THRESHOLD_": (-1, 1 << 30), "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20)}
_TUNABLES = "GLIBC_TUNABLES"
ALLOCATOR = "PYTORCH_ALLOC_CONF"
ALLOCATOR_BEFORE = "PYTORCH_CUDA_ALLOC_CONF"  # its older name, which torch still reads


def prepare_torch() -> None:
    """Have large CPU tensors lie in huge pages of memory that stays with the process, and torch log errors alone.

    Memory of GPUs is taken in segments that grow, unless a variable for torch's allocator is set.
    Call it before torch is imported. [Note: Memory that stays]. Where a rank is lost, torch warns with C++ stack
    traces of each peer's connection; our one line names the rank. Its profiler tells whenever it starts and stops.
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


def cache_folder() -> Path | None:
    """Where this user keeps what can be computed again: ``zeroshard`` in ``XDG_CACHE_HOME``, else in ``~/.cache``.

    None where there is no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # any other must be ignored: https://specifications.freedesktop.org/basedir-spec
        return Path(named) / "zeroshard"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "zeroshard" if os.path.isabs(home) else None


def forget_empty_variables() -> None:
    """Have torch find no ``TORCH_LOGS`` where it is empty: its import ends in an AttributeError of its own then."""
    if os.environ.get("TORCH_LOGS") == "":
        del os.environ["TORCH_LOGS"]


def interpret_kernels() -> None:
    """Have Triton interpret our kernels where it has no GPU to compile them for; call it before `zeroshard.kernels`
    is imported.
    """
    os.environ.setdefault("TRITON_INTERPRET", "1")


def allocator_settings() -> str:
    """What the environment tells torch's allocator of GPUs' memory; empty: nothing."""
    return os.environ.get(ALLOCATOR) or os.environ.get(ALLOCATOR_BEFORE, "")


def _keep_freed_memory() -> None:
    """Both thresholds or none: one alone ends malloc's own adjusting of the other, and every tensor would be mapped."""
    spoken = any(name in os.environ for name in _THRESHOLDS) or "malloc" in os.environ.get(_TUNABLES, "")
    if spoken or not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl has no such dials
        return
    for name, (option, num_bytes) in _THRESHOLDS.items():
        mallopt(option, num_bytes)  # here, where malloc has read the environment already
        os.environ[name] = str(num_bytes)  # in processes started from here
