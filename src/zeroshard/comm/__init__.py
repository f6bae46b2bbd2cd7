"""Collectives: one contract, several implementations, and wrappers that observe them.

Names are loaded on first use: `zeroshard.comm.launch` is read by a command line that may need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
    from zeroshard.comm.base import (
        Allocator,
        Buffered,
        Communicator,
        Done,
        Groups,
        PeerError,
        ReduceOp,
        Splittable,
        Tells,
        Work,
        buffer_bytes,
        empty_for,
        split,
    )
    from zeroshard.comm.blocking import BlockingCommunicator
    from zeroshard.comm.exposed import Exposed, by_kind
    from zeroshard.comm.labels import CONTROL, current_scope, scope
    from zeroshard.comm.local import LocalCommunicator
    from zeroshard.comm.null import NullCommunicator
    from zeroshard.comm.observe import CommRecord, ObservedCommunicator
    from zeroshard.comm.p2p import ThreadTransport, TorchTransport, Transport, thread_transports
    from zeroshard.comm.ring import RingCommunicator
    from zeroshard.comm.shm import SharedMemoryCommunicator, ranks_share_host
    from zeroshard.comm.sockets import SocketTransport
    from zeroshard.comm.threads import ThreadCommunicator, run_threads
    from zeroshard.comm.throttle import Link, ThrottledCommunicator
    from zeroshard.comm.torch_dist import TorchCommunicator

_HOME = {
    "Allocator": "base",
    "Buffered": "base",
    "Communicator": "base",
    "Done": "base",
    "Groups": "base",
    "PeerError": "base",
    "ReduceOp": "base",
    "Splittable": "base",
    "Tells": "base",
    "Work": "base",
    "buffer_bytes": "base",
    "empty_for": "base",
    "split": "base",
    "BlockingCommunicator": "blocking",
    "Exposed": "exposed",
    "by_kind": "exposed",
    "LocalCommunicator": "local",
    "NullCommunicator": "null",
    "CommRecord": "observe",
    "ObservedCommunicator": "observe",
    "CONTROL": "labels",
    "current_scope": "labels",
    "scope": "labels",
    "ThreadTransport": "p2p",
    "TorchTransport": "p2p",
    "Transport": "p2p",
    "thread_transports": "p2p",
    "RingCommunicator": "ring",
    "SharedMemoryCommunicator": "shm",
    "ranks_share_host": "shm",
    "SocketTransport": "sockets",
    "ThreadCommunicator": "threads",
    "run_threads": "threads",
    "Link": "throttle",
    "ThrottledCommunicator": "throttle",
    "TorchCommunicator": "torch_dist",
}

__all__ = [
    "CONTROL",
    "Allocator",
    "BlockingCommunicator",
    "Buffered",
    "CommRecord",
    "Communicator",
    "Done",
    "Exposed",
    "Groups",
    "Link",
    "LocalCommunicator",
    "NullCommunicator",
    "ObservedCommunicator",
    "PeerError",
    "ReduceOp",
    "RingCommunicator",
    "SharedMemoryCommunicator",
    "SocketTransport",
    "Splittable",
    "Tells",
    "ThreadCommunicator",
    "ThreadTransport",
    "ThrottledCommunicator",
    "TorchCommunicator",
    "TorchTransport",
    "Transport",
    "Work",
    "buffer_bytes",
    "by_kind",
    "current_scope",
    "empty_for",
    "ranks_share_host",
    "run_threads",
    "scope",
    "split",
    "thread_transports",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
