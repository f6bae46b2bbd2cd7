"""`zeroshard doctor`: text to paste into a bug report: versions, machine, devices, and what `auto` chooses here."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import psutil

import zeroshard
from zeroshard.host.columns import columns
from zeroshard.host.launch.environment import variable, world_from_env
from zeroshard.host.process import ALLOCATOR, allocator_settings, num_cpus

GIB = 2**30
# Environment variables that decide over which network ranks communicate, and how.
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"),
    *("NCCL_NET_GDR_LEVEL", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_ALGO", "NCCL_DEBUG"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_TRACE_BUFFER_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES"),
    *("OMP_NUM_THREADS", "TORCH_CPP_LOG_LEVEL"),
)
_OF_DEVELOPERS = ("dev", "docs", "notebook")  # extras for those who change zeroshard


def report() -> str:
    """The complete report, with one ``name  value`` per line."""
    lines = _requires()
    required = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]
    how = "" if required else " (run from its source, not installed)"
    rows = [("zeroshard", zeroshard.__version__ + how), ("python", platform.python_version())]
    rows += [(name, _version(name)) for name in required or ("torch", "numpy")]
    rows += [("triton", _version("triton")), ("os", platform.platform()), ("cpus", str(num_cpus()))]
    memory = psutil.virtual_memory()
    rows.append(("memory", f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"))
    rows += _devices()
    rows += _extras(lines)
    world = world_from_env()
    rows.append(("world", "none" if world is None else f"rank {world.rank} of {world.world_size}"))
    rows += [(name, variable(name)) for name in VARIABLES if variable(name)]
    return "\n".join(columns(rows))


def _devices() -> list[tuple[str, str]]:
    import torch
    import torch.distributed as dist

    rows = []
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        rows.append((f"cuda:{index}", f"{facts.name}, {facts.total_memory / GIB:.1f} GiB"))
    has_cuda = torch.cuda.is_available()
    if not has_cuda:
        rows.append(
            ("cuda", f"none (torch built {'for CUDA ' + torch.version.cuda if torch.version.cuda else 'without CUDA'})")
        )
    rows.append(("gloo", _yes(dist.is_available() and dist.is_gloo_available())))
    rows.append(("nccl", _yes(dist.is_available() and dist.is_nccl_available())))
    rows.append(("bfloat16 on cuda", _yes(has_cuda and torch.cuda.is_bf16_supported())))
    if has_cuda:
        rows.append(("cuda memory", allocator_settings() or f"runs set {ALLOCATOR}=expandable_segments:True"))
    rows.append(("device auto", "cuda" if has_cuda else "cpu"))
    rows.append(("kernels auto", _kernels(torch.device("cuda" if has_cuda else "cpu"))))
    rows.append(("comm auto", "torch (nccl)" if has_cuda else "shm on one host, ring on several"))
    return rows


def _kernels(device: Any) -> str:
    from zeroshard.kernels import describe

    served = describe(device, "auto")
    return ", ".join(f"{operation}: {backend}" for operation, backend in served.items())


def _requires() -> list[str]:
    """What zeroshard's metadata say that it requires, one package a line; empty if it is not installed."""
    try:
        return metadata.requires("zeroshard") or []
    except metadata.PackageNotFoundError:
        return []


def _extras(lines: Sequence[str]) -> list[tuple[str, str]]:
    """Which extras have all of their packages here, and which packages the others lack; empty if not installed."""
    if not lines:
        return []
    needed: dict[str, list[str]] = {}
    for line in lines:
        found = re.match(r"([\w.-]+).*extra == ['\"]([\w-]+)['\"]", line)
        if found and found[2] not in _OF_DEVELOPERS:
            needed.setdefault(found[2], []).append(found[1])
    missing = {extra: [name for name in names if not _is_installed(name)] for extra, names in needed.items()}
    there = ", ".join(extra for extra, names in missing.items() if not names)
    absent = ", ".join(f"{extra} ({', '.join(names)})" for extra, names in missing.items() if names)
    return [("extras", (there or "none") + (f"; missing: {absent}" if absent else ""))]


def _is_installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "present, version unknown" if find_spec(name) else "not installed"


def _yes(found: bool) -> str:
    return "yes" if found else "no"
