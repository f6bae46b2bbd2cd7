"""What a run settles before state leaves the device: how much does, that hosts have the memory and disks the room."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path

import torch

from zeroshard.comm import Communicator
from zeroshard.comm.agree import agreement, by_rank, first_rank_does, largest, of_first_rank, send_bytes
from zeroshard.host import host_memory
from zeroshard.host.errors import UserError
from zeroshard.host.host_memory import GIB
from zeroshard.parallel import strategy_entry
from zeroshard.settings.offload import OffloadConfig
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.records.plan_contract import Planned
from zeroshard.train.records.records import in_memory
from zeroshard.train.setup.plans import PLANNED, Plans
from zeroshard.zero.offload.rank_files import left_behind

HEADROOM = 0.1  # share of free memory that must stay free: other processes, fragments, communicators' buffers
_UNIT = 1e9  # a fraction is sent as a whole number of these parts


def settled(config: TrainConfig, plans: Plans) -> tuple[TrainConfig, str]:
    """Return the configuration with a number for ``offload.fraction``, and the reason if it was ``auto``. Collective.

    Raises:
        UserError: the ranks of a machine keep more in memory of the host, or in files, than it has; raised on every
            rank.
    """
    comm, device, predict = plans.comm, plans.device, plans.predict
    if not config.offload.on:
        return config, ""
    asked, why = config.offload.share == "auto", ""
    if asked and (predict is None or config.optimizer != "adamw"):
        asked, why = False, f"no plan predicts a step of {config.optimizer}"
    if predict is None or config.optimizer not in PLANNED or (config.optimizer != "adamw" and config.offload.on_disk):
        return config, why
    neighbours = neighbours_of(comm)
    job = plans.job(config, strategy_entry(config.strategy).stage)
    if asked:
        free_bytes = -largest(comm, -num_free_bytes(device, len(neighbours)))  # the smallest of all ranks
        to_choose = replace(job, free_bytes=int(free_bytes * (1 - HEADROOM)), ranks_per_node=len(neighbours))
        chosen: list[Planned] = []  # filled on rank 0 alone, as a trace takes a second
        first_rank_does(comm, lambda: chosen.append(predict(to_choose)))
        parts = [round((planned.fraction or 0.0) * _UNIT) for planned in chosen] or [0]
        fraction = of_first_rank(comm, parts)[0] / _UNIT
        why = send_bytes(comm, (chosen[0].why_fraction if chosen else "").encode(), 0).decode()
        chosen_number = config.offload.model_copy(update={"fraction": f"{fraction:.9g}"})
        config = config.model_copy(update={"offload": chosen_number if fraction else OffloadConfig()})
        if not fraction:
            return config, why
        assert job.offload is not None
        job = replace(job, offload=replace(job.offload, fraction=fraction))
    planned = predict(replace(job, calibration="", estimates=False))
    resident, folder = planned.memory_bytes, config.offload.folder(Path(config.out))
    if folder is not None:
        require_room(comm, planned.file_bytes, folder, neighbours)
    on_host = resident if device.type == "cpu" else {k: n for k, n in resident.items() if k.startswith("host_")}
    require_host_memory(comm, in_memory(on_host), neighbours)
    return config, why


def num_free_bytes(device: torch.device, num_ranks: int) -> int:
    """Return the bytes that this rank may still allocate: the device's free memory, on CPUs over ``num_ranks``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return (host_memory.available_bytes() or 0) // num_ranks


def require_host_memory(comm: Communicator, num_bytes: int, neighbours: Sequence[int]) -> None:
    """Raise UserError if this rank's ``num_bytes`` and those of its ``neighbours`` are more than their host has.

    ``neighbours``: the ranks of this machine, with this one. Collective; every rank raises.
    """
    of_ranks = by_rank(comm, num_bytes)
    with agreement(comm, phase="accounting for memory of the hosts"):
        total = sum(of_ranks[rank] for rank in neighbours)
        host_memory.require_memory(total, host_memory.total_bytes(), len(neighbours), socket.gethostname())


def require_room(comm: Communicator, num_bytes: int, folder: Path, neighbours: Sequence[int]) -> None:
    """Raise UserError if the disk has no room for this rank's ``num_bytes`` and those of its ``neighbours``.

    Collective; every rank raises. Files of a run that was killed count as room, as they are removed.
    """
    of_ranks = by_rank(comm, num_bytes)
    with agreement(comm, phase="accounting for files of states"):
        total = sum(num for rank, num in enumerate(of_ranks) if rank in neighbours)
        there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
        disk = os.statvfs(there)
        free = disk.f_bavail * disk.f_frsize + sum(path.stat().st_blocks * 512 for path in left_behind(folder))
        if total > free:
            ranks = "1 rank keeps" if len(neighbours) == 1 else f"{len(neighbours)} ranks keep"
            what = f"{ranks} {total / GIB:,.2f} GiB in files of {folder}, whose disk has {free / GIB:,.2f} GiB free"
            raise UserError("offload.path", what, "free space, or name a folder on another disk")


def room_for_files(config: TrainConfig) -> int:
    """Bytes that are free for files of states where this run would put them; 0 where files are kept in memory."""
    folder = config.offload.model_copy(update={"state": "disk"}).folder(Path(config.out))
    assert folder is not None
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    return 0 if host_memory.keeps_files_of(there) else shutil.disk_usage(there).free


def neighbours_of(comm: Communicator) -> list[int]:
    """The ranks of this machine, or of this container if its name is its own."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:  # not Linux
        machine = ""
    name = f"{machine} {socket.gethostname()}".encode()
    hosts = by_rank(comm, int.from_bytes(blake2b(name, digest_size=8).digest(), "big", signed=True))
    return [rank for rank, host in enumerate(hosts) if host == hosts[comm.rank]]
