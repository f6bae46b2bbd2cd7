"""Collectives: one contract, several implementations, and wrappers that observe them."""

from zeroshard.comm.base import Communicator, Done, ReduceOp, Work
from zeroshard.comm.local import LocalCommunicator
from zeroshard.comm.null import NullCommunicator
from zeroshard.comm.observe import CommRecord, ObservedCommunicator
from zeroshard.comm.scope import CONTROL, current_scope, scope
from zeroshard.comm.threads import PeerError, ThreadCommunicator, run_threads
from zeroshard.comm.torch_dist import TorchCommunicator

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
