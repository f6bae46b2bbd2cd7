"""Collectives: one contract, several implementations, and wrappers that observe them.

Names are loaded on first use: `zeroshard.comm.launch` is read by a command line that may need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroshard.comm.base import Communicator, Done, PeerError, ReduceOp, Work
    from zeroshard.comm.labels import CONTROL, current_scope, scope
    from zeroshard.comm.local import LocalCommunicator
    from zeroshard.comm.null import NullCommunicator
    from zeroshard.comm.observe import CommRecord, ObservedCommunicator
    from zeroshard.comm.threads import ThreadCommunicator, run_threads
    from zeroshard.comm.torch_dist import TorchCommunicator

_HOME = {
    "Communicator": "base",
    "Done": "base",
    "PeerError": "base",
    "ReduceOp": "base",
    "Work": "base",
    "LocalCommunicator": "local",
    "NullCommunicator": "null",
    "CommRecord": "observe",
    "ObservedCommunicator": "observe",
    "CONTROL": "labels",
    "current_scope": "labels",
    "scope": "labels",
    "ThreadCommunicator": "threads",
    "run_threads": "threads",
    "TorchCommunicator": "torch_dist",
}

__all__ = [
    "CONTROL",
    "CommRecord",
    "Communicator",
    "Done",
    "LocalCommunicator",
    "NullCommunicator",
    "ObservedCommunicator",
    "PeerError",
    "ReduceOp",
    "ThreadCommunicator",
    "TorchCommunicator",
    "Work",
    "current_scope",
    "run_threads",
    "scope",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
