"""What is known of this machine's memory: how much can still be had, and which part of it is near a GPU.

A process may have less than the machine: a control group (a container, a systemd unit, ``docker run --memory``) bounds
the sum over its processes, and the kernel kills one of them beyond it. Pages of files that the kernel could drop count
there too, so they are taken off what is in use.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from zeroshard.host.errors import UserError

GIB = 2**30
PROC = Path("/proc")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
DEVICES = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")
_NO_LIMIT = 1 << 60  # what version 1 says where there is none is a little under 2^63
# file of the limit, of the use, and the entries of memory.stat that the kernel can drop, by the group's version
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def available_bytes() -> int | None:
    """Bytes that this process can still allocate without swapping or being killed; None where nothing says it."""
    found = [_in_machine(), *_in_groups()]
    known = [num_bytes for num_bytes in found if num_bytes is not None]
    return max(min(known), 0) if known else None


def bytes_within_limits() -> int | None:
    """Bytes that this process may still map by its own limits (``ulimit -d``, ``ulimit -v``); None: it has none."""
    now, found = _entries(PROC / "self" / "status"), []
    for limit, used in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY and used in now:
            found.append(max(most - now[used] * 1024, 0))
    return min(found, default=None)


def num_oom_kills() -> int | None:
    """How many processes of this control group the kernel has killed as memory ran out; None where nothing says it.

    Of the machine, if the group has no such count.
    """
    folders = [folder for folder, _ in _groups()]
    files = [folder / name for folder in folders for name in ("memory.events", "memory.oom_control")]
    found = (_entries(file).get("oom_kill") for file in (*files, PROC / "vmstat"))
    return next((count for count in found if count is not None), None)


def keeps_files_of(folder: Path) -> bool:
    """Whether the folder's file system keeps its files in memory, as far as the kernel says it."""
    device = os.stat(folder).st_dev
    try:
        lines = (PROC / "self" / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    return any(f" {number} " in line and " - tmpfs " in line for line in lines)


def total_bytes() -> int | None:
    """Bytes of memory that all processes here may have together: the machine's, or a control group's if it has less."""
    known = [limit for limit, _ in _limits()]
    machine = _meminfo("MemTotal")
    known += [machine] if machine is not None else []
    return min(known) if known else None


def require_memory(
    num_bytes: int, has_bytes: int | None, num_ranks: int, host: str, field: str = "offload.state"
) -> None:
    """Raise UserError if ``num_ranks`` ranks keep ``num_bytes`` in memory of ``host``, which has less.

    Before a run ``has_bytes`` is `total_bytes`, and in a plan what a node has; None: nobody knows. ``field``: the
    setting that keeps them there.
    """
    if has_bytes is not None and num_bytes > has_bytes:
        ranks = "1 rank keeps" if num_ranks == 1 else f"{num_ranks} ranks keep"
        what = f"{ranks} {num_bytes / GIB:,.2f} GiB in memory of {host}, which has {has_bytes / GIB:,.2f} GiB"
        todo = "give a smaller --offload.fraction, use more machines, or fewer ranks"
        if field == "model.activation_checkpointing":
            todo = "recompute the inputs of blocks (full), use more machines, or fewer ranks"
        raise UserError(field, what, todo)


def node_of(device: torch.device) -> int | None:
    """The NUMA node of a GPU; None if there is one node alone, or nothing says which it is."""
    if device.type != "cuda" or len(list(NODES.glob("node[0-9]*"))) < 2:
        return None
    of = torch.cuda.get_device_properties(device)
    address = f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"
    node = _number(DEVICES / address / "numa_node")
    return node if node is not None and node >= 0 else None  # -1: the firmware did not say


@contextmanager
def on_node(node: int | None) -> Generator[None]:
    """Run this thread on the CPUs of a NUMA node, so that pages it touches first lie there; None: anywhere.

    If none of the node's CPUs may be used by this process, the thread stays where it is.
    """
    if node is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)  # 0: the thread that calls, and no other
    near = before & _cpus(node)
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _cpus(node: int) -> set[int]:
    """The CPUs of a node, which the kernel lists as ``0-15,32-47``."""
    try:
        ranges = (NODES / f"node{node}" / "cpulist").read_text().strip().split(",")
    except OSError:
        return set()
    ends = [span.partition("-") for span in ranges if span]
    return {cpu for first, _, last in ends for cpu in range(int(first), int(last or first) + 1)}


def _in_machine() -> int | None:
    return _meminfo("MemAvailable")


def _in_groups() -> Iterator[int]:
    for limit, used in _limits():
        yield limit - used


def _limits() -> Iterator[tuple[int, int]]:
    """``(limit, bytes in use)`` of the control group of this process and of those around it, if they have a limit."""
    for folder, (limit_file, use_file, droppable) in _groups():
        limit, used = _number(folder / limit_file), _number(folder / use_file)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            stat = _entries(folder / "memory.stat")
            yield limit, used - sum(stat.get(name, 0) for name in droppable)


def _groups() -> Iterator[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """The folders of the control group of this process and of those around it, with the names of their files."""
    try:
        lines = (PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for _, kinds, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if not kinds:
            top, files = CONTROL_GROUPS, _V2
        elif "memory" in kinds.split(","):
            top, files = CONTROL_GROUPS / "memory", _V1
        else:
            continue
        group = top / path.lstrip("/")
        # Inside a container the path is often that of the host, and only the top is mounted: so look there in any case.
        for folder in [group, *(parent for parent in group.parents if parent == top or top in parent.parents)]:
            yield folder, files


def _meminfo(name: str) -> int | None:
    found = _entries(PROC / "meminfo").get(f"{name}:")
    return None if found is None else found * 1024


def _entries(path: Path) -> dict[str, int]:
    """The lines ``name number ...`` of a file of the kernel; empty if it is missing."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}


def _number(path: Path) -> int | None:
    """The integer in a file of the kernel; None if it is missing, or says ``max``."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
