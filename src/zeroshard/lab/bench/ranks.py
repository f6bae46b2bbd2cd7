"""Ranks for a bench: fresh processes of this machine, over gloo or NCCL; what rank 0 returns comes back."""

from __future__ import annotations

import gc
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zeroshard.comm import Communicator, LocalCommunicator
from zeroshard.comm.registry import comm_entry

T = TypeVar("T")


def on_ranks(fn: Callable[..., T], world_size: int, *args: Any, device: str = "cpu", num_threads: int = 1) -> T:
    """``fn(rank, device, *args)`` on each of ``world_size`` processes; what rank 0 returned.

    Args:
        fn: of a module, so that a fresh process finds it. `torch.distributed` is initialised where there are several.
        world_size: how many; 1 is this process.
        args: that can be pickled.
        device: ``cpu`` or ``cuda``; with CUDA ranks take the devices in turn.
        num_threads: that compute, of each rank.
    """
    if world_size == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            return fn(0, torch.device(device, 0) if device == "cuda" else torch.device(device), *args)
        finally:
            torch.set_num_threads(before)
    with tempfile.TemporaryDirectory() as folder:
        spawn = (fn, world_size, folder, device, num_threads, args)
        mp.start_processes(_rank_main, args=spawn, nprocs=world_size, start_method="spawn")
        return pickle.loads(Path(folder, "result").read_bytes())  # ours, written a moment ago


def _rank_main(
    rank: int,
    fn: Callable[..., Any],
    world_size: int,
    folder: str,
    device_type: str,
    num_threads: int,
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(num_threads)
    device = torch.device("cpu")
    if device_type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    result = fn(rank, device, *args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def communicator(name: str) -> Communicator:
    """One of `zeroshard.comm.registry` over the default group; in a world of one, the local one."""
    return comm_entry(name)() if dist.is_initialized() else LocalCommunicator()


def close(comm: Communicator) -> None:
    """End what a communicator has started, if it has."""
    end = getattr(comm, "close", None)
    if end is not None:
        end()


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: list[float]) -> list[float]:
    """Each entry as it was on the slowest rank; collective."""
    if not dist.is_initialized():
        return seconds
    message = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(message, dist.ReduceOp.MAX)
    return message.tolist()
