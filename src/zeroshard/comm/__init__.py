"""Collectives: one interface (`Communicator`), several implementations, and wrappers that observe or slow them.

Names are loaded on first use, so that the command line can be parsed without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zeroshard.lazily import loaded

if TYPE_CHECKING:
    from zeroshard.comm.backends.local import LocalCommunicator
    from zeroshard.comm.backends.null import NullCommunicator
    from zeroshard.comm.backends.threads import ThreadCommunicator, run_threads
    from zeroshard.comm.backends.torch_dist import TorchCommunicator
    from zeroshard.comm.base import (
        Communicator,
        Done,
        Groups,
        PeerError,
        ReduceOp,
        Work,
        all_to_all,
        buffer_bytes,
        empty_for,
        reduce_scatter_consuming,
        split,
    )
    from zeroshard.comm.labels import CONTROL, current_scope, scope
    from zeroshard.comm.queued.messages import ThreadTransport, Transport, thread_transports
    from zeroshard.comm.ring.ring import RingCommunicator
    from zeroshard.comm.ring.sockets import SocketTransport
    from zeroshard.comm.shm.shm import SharedMemoryCommunicator, ranks_share_host
    from zeroshard.comm.wrappers.blocking import BlockingCommunicator
    from zeroshard.comm.wrappers.exposed import Exposed, by_kind
    from zeroshard.comm.wrappers.observe import CommRecord, ObservedCommunicator
    from zeroshard.comm.wrappers.throttle import Link, ThrottledCommunicator

_HOME = {
    "Communicator": "base",
    "Done": "base",
    "Groups": "base",
    "PeerError": "base",
    "ReduceOp": "base",
    "Work": "base",
    "all_to_all": "base",
    "buffer_bytes": "base",
    "empty_for": "base",
    "reduce_scatter_consuming": "base",
    "split": "base",
    "BlockingCommunicator": "wrappers.blocking",
    "Exposed": "wrappers.exposed",
    "by_kind": "wrappers.exposed",
    "LocalCommunicator": "backends.local",
    "NullCommunicator": "backends.null",
    "CommRecord": "wrappers.observe",
    "ObservedCommunicator": "wrappers.observe",
    "CONTROL": "labels",
    "current_scope": "labels",
    "scope": "labels",
    "ThreadTransport": "queued.messages",
    "Transport": "queued.messages",
    "thread_transports": "queued.messages",
    "RingCommunicator": "ring.ring",
    "SharedMemoryCommunicator": "shm.shm",
    "ranks_share_host": "shm.shm",
    "SocketTransport": "ring.sockets",
    "ThreadCommunicator": "backends.threads",
    "run_threads": "backends.threads",
    "Link": "wrappers.throttle",
    "ThrottledCommunicator": "wrappers.throttle",
    "TorchCommunicator": "backends.torch_dist",
}

__all__ = [
    "CONTROL",
    "BlockingCommunicator",
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
    "ThreadCommunicator",
    "ThreadTransport",
    "ThrottledCommunicator",
    "TorchCommunicator",
    "Transport",
    "Work",
    "all_to_all",
    "buffer_bytes",
    "by_kind",
    "current_scope",
    "empty_for",
    "ranks_share_host",
    "reduce_scatter_consuming",
    "run_threads",
    "scope",
    "split",
    "thread_transports",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return loaded(f"{__name__}.{_HOME[name]}", name)
