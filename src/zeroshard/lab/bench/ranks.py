"""Run a function on several ranks of this machine, each a fresh process, over gloo or NCCL."""

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
from zeroshard.host.errors import UserError

T = TypeVar("T")


def chosen_device(wanted: str, num_ranks: int = 1) -> str:
    """``cpu`` or ``cuda`` for ``wanted``, which may be ``auto``.

    Raises:
        UserError: CUDA is asked for and not available, or has fewer devices than there are ranks.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else wanted
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device", "there is no CUDA device", "use --device cpu")
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        what = f"{num_ranks} ranks find {torch.cuda.device_count()} CUDA devices"
        raise UserError("nproc", what, "start at most as many, or use --device cpu")
    return device


def on_ranks(fn: Callable[..., T], world_size: int, *args: Any, device: str = "cpu", num_threads: int = 1) -> T:
    """Call ``fn(rank, device, *args)`` in each of ``world_size`` processes; returns the result of rank 0.

    Args:
        fn: a function of a module, so that a fresh process can import it. If there are several ranks,
            `torch.distributed` is initialised.
        world_size: number of ranks; 1 runs in this process.
        args: arguments that can be pickled.
        device: ``cpu`` or ``cuda``; on CUDA rank r uses device r modulo their number.
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
        return pickle.loads(Path(folder, "result").read_bytes())  # safe to unpickle: our own rank wrote it


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
    """A communicator of `zeroshard.comm.registry` over the default group; with a single rank, `LocalCommunicator`."""
    return comm_entry(name)() if dist.is_initialized() else LocalCommunicator()


def close(comm: Communicator) -> None:
    """Close a communicator, if it has anything to close."""
    end = getattr(comm, "close", None)
    if end is not None:
        end()


def synchronise(device: torch.device) -> None:
    """Wait until a CUDA device has finished all kernels that were launched; on the CPU nothing waits."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: list[float]) -> list[float]:
    """The maximum of each entry over the ranks; a collective."""
    if not dist.is_initialized():
        return seconds
    message = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(message, dist.ReduceOp.MAX)
    return message.tolist()
