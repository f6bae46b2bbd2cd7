"""The sentinel for a loop of the user's own: a rank that leaves a collective out is named where others would hang.

The trainer ends its ranks when the sentinel finds a fault (`zeroshard.train.setup.ranks`). A user's process is not ours
to end, so the operation that waits raises PeerError, with the line of the user's code in its traceback. Only a process
that is blocked where nothing can be raised (on a GPU, in a collective of the user's own) is ended, after `GRACE_S`.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm.base import Communicator
from zeroshard.comm.labels import CONTROL, labelled
from zeroshard.comm.wrappers.place import place_of_main_thread
from zeroshard.comm.wrappers.sentinel import SentinelCommunicator, StoreBoard, sentinel_of
from zeroshard.comm.wrappers.wrapper import Wrapper
from zeroshard.host.errors import ExitStatus

GRACE_S = 10.0  # from a fault to the end of a process that does not raise it
EXIT_S = 2.0  # how long a process that has raised one may take to exit: gloo waits for its collectives there
# A rank that is busy in C code without releasing Python's lock posts no pulses. The trainer's ranks never are so for
# long, but a user's may load a file or compile.
LOST_AFTER_S = 60.0
_NAME_BYTES = 8


def watched(comm: Communicator) -> Communicator:
    """Return ``comm`` under a `SentinelCommunicator`, if its ranks are processes of torch.distributed. Collective.

    ``comm`` itself is returned if it is watched already, has one rank or no peers (`NullCommunicator`), or its ranks
    are threads, which notice by themselves that they have diverged.
    """
    in_processes = dist.is_available() and dist.is_initialized() and dist.get_backend() != "fake"
    in_main_thread = threading.current_thread() is threading.main_thread()  # ranks that are threads never are
    if comm.world_size == 1 or sentinel_of(comm) is not None or not (in_processes and in_main_thread):
        return comm
    innermost = comm
    while isinstance(innermost, Wrapper):
        innermost = innermost.inner
    if not getattr(innermost, "has_peers", True):
        return comm
    store: Any = dist.distributed_c10d._get_default_store()
    own = store.clone()  # a request of the main thread may block, and would block ours
    board = _Board(dist.PrefixStore(_common_name(comm), own))
    raised = _Raised()

    def end(line: str, found_here: bool) -> None:
        if not raised.wait(GRACE_S):
            from zeroshard.host.launch.rank_exit import end_as_peer_lost  # a library is imported without it

            end_as_peer_lost(f"rank {comm.rank}: {line}; this rank is {place_of_main_thread()}", True)

    return SentinelCommunicator(
        comm, board, end, lost_after_s=LOST_AFTER_S, raised=raised, on_wait=logging.getLogger("zeroshard.comm").warning
    )


class _Raised(threading.Event):
    """Set once a fault was raised. The process may then exit in its own way, but not hang in it."""

    def set(self) -> None:
        """Set it."""
        if not self.is_set():
            from zeroshard.host.launch.rank_exit import end_by_kernel

            atexit.register(end_by_kernel, EXIT_S, int(ExitStatus.FAILED))
        super().set()


class _Board(StoreBoard):
    """A board that is gone with the process group: the store may be then."""

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        _require_group()
        super().post(key, value)

    def read(self, key: str) -> bytes | None:
        """A key's value, or None."""
        _require_group()
        return super().read(key)


def _require_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError("the process group was destroyed; build the engine again")


def _common_name(comm: Communicator) -> str:
    """Return a name that rank 0 has drawn, the same on each rank and different for each call. Collective."""
    drawn = torch.frombuffer(bytearray(os.urandom(_NAME_BYTES)), dtype=torch.uint8).to(comm.control_device)
    with labelled(CONTROL):
        comm.broadcast(drawn, src=0).wait()
    return bytes(drawn.tolist()).hex()
