"""Where the ranks of one host meet: a store in the launcher, on one address of this host, new for each attempt.

torch's c10d rendezvous serves its store on every network interface and from before the first rank is started until
after the last one. Here the launcher opens the listening socket on the address that it was given (the loopback
interface, or a bridge to network namespaces), so that no other host reaches it; it then forks the ranks, whose
connections wait in the socket's queue, and only then serves the store: at the fork there is no thread of the store
([Note: What a fork copies] in `forked`). A restarted world gets another socket and an empty store.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from zeroshard.launch.forked import FIRST_FD

BACKLOG = 4096  # connections that wait until the store is served
STORE_TIMEOUT_S = 600.0


class OneHost(RendezvousHandler):
    """The rendezvous of a launcher whose ranks are all on this host.

    Args:
        address: of this host, where the store listens.
        port: there; 0: any free one.
        run_id: of this launch.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._address, self._port, self._run_id = address, port, run_id
        self._listening: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._closed = False

    def serve(self) -> None:
        """Serve the store, once the ranks have been forked."""
        assert self._listening is not None, "the ranks have not met"
        port = self._listening.getsockname()[1]
        self._store = dist.TCPStore(
            self._address,
            port,
            is_master=True,
            timeout=timedelta(seconds=STORE_TIMEOUT_S),
            wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
        )
        self._listening = None

    def _end_attempt(self) -> None:
        self._store = None  # its thread ends with it
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    def next_rendezvous(self) -> RendezvousInfo:
        """This host alone, with a socket that listens and no store behind it yet."""
        self._end_attempt()
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((self._address, self._port))
        listening.listen(BACKLOG)
        assert listening.fileno() >= FIRST_FD
        self._listening = listening
        where = RendezvousStoreInfo(self._address, listening.getsockname()[1])
        return RendezvousInfo(dist.HashStore(), 0, 1, where)

    @property
    def use_agent_store(self) -> bool:
        """Rank 0 opens no store: the launcher's is theirs."""
        return True

    def get_backend(self) -> str:
        """What torch's logs call it."""
        return "one-host"

    def get_run_id(self) -> str:
        """Of this launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """No rank meets here any more."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """No other host may join."""
        return 0

    def shutdown(self) -> bool:
        """Close the store."""
        self._end_attempt()
        return True
