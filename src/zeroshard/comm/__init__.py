"""Collectives: one interface (`Communicator`), several implementations, and wrappers that observe or slow them.

Names are loaded on first use, so that the command line can be parsed without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zeroshard.host.lazily import lazy_names

if TYPE_CHECKING:
    from zeroshard.comm.backends.null import LocalCommunicator as LocalCommunicator
    from zeroshard.comm.backends.null import NullCommunicator as NullCommunicator
    from zeroshard.comm.backends.threads import ThreadCommunicator as ThreadCommunicator
    from zeroshard.comm.backends.threads import run_threads as run_threads
    from zeroshard.comm.backends.torch_dist import TorchCommunicator as TorchCommunicator
    from zeroshard.comm.base import Communicator as Communicator
    from zeroshard.comm.base import Done as Done
    from zeroshard.comm.base import Groups as Groups
    from zeroshard.comm.base import PeerError as PeerError
    from zeroshard.comm.base import ReduceOp as ReduceOp
    from zeroshard.comm.base import Work as Work
    from zeroshard.comm.base import all_to_all as all_to_all
    from zeroshard.comm.base import buffer_bytes as buffer_bytes
    from zeroshard.comm.base import empty_for as empty_for
    from zeroshard.comm.base import reduce_scatter_consuming as reduce_scatter_consuming
    from zeroshard.comm.base import split as split
    from zeroshard.comm.labels import CONTROL as CONTROL
    from zeroshard.comm.labels import current_label as current_label
    from zeroshard.comm.labels import labelled as labelled
    from zeroshard.comm.queued.messages import Transport as Transport
    from zeroshard.comm.ring.ring import RingCommunicator as RingCommunicator
    from zeroshard.comm.ring.sockets import SocketTransport as SocketTransport
    from zeroshard.comm.ring.sockets import thread_transports as thread_transports
    from zeroshard.comm.shm.shm import SharedMemoryCommunicator as SharedMemoryCommunicator
    from zeroshard.comm.shm.shm import ranks_share_host as ranks_share_host
    from zeroshard.comm.wrappers.blocking import BlockingCommunicator as BlockingCommunicator
    from zeroshard.comm.wrappers.exposed import Exposed as Exposed
    from zeroshard.comm.wrappers.exposed import by_kind as by_kind
    from zeroshard.comm.wrappers.observe import CommRecord as CommRecord
    from zeroshard.comm.wrappers.observe import ObservedCommunicator as ObservedCommunicator
    from zeroshard.comm.wrappers.throttle import Link as Link
    from zeroshard.comm.wrappers.throttle import ThrottledCommunicator as ThrottledCommunicator

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
