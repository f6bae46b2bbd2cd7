"""The rendezvous of ranks on one host: a store in the launcher, on one address of this host, new for each attempt.

torch's c10d rendezvous serves its store on every network interface, and already when ranks are started. Here the
launcher opens the listening socket only on the address that it was given (the loopback interface, or a bridge to
network namespaces), so that no other host can reach it. It then forks the ranks, whose connections wait in the socket's
queue. Only then does it serve the store, so that the store's thread does not exist at the fork
([Note: What a fork copies] in `forked`). A restarted world gets a new socket and an empty store.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from zeroshard.host.launch.bound_tcp_store import listening_socket
from zeroshard.host.launch.forked import FIRST_FD

STORE_TIMEOUT_S = 600.0


class OneHost(RendezvousHandler):
    """The rendezvous handler of a launcher whose ranks are all on this host.

    Args:
        address: address of this host at which the store listens.
        port: port of the store; 0: any free one.
    """

    def __init__(self, address: str, port: int, run_id: str) -> None:
        self._address, self._port, self._run_id = address, port, run_id
        self._listening: socket.socket | None = None
        self._store: dist.TCPStore | None = None
        self._closed = False

    def serve(self) -> None:
        """Serve the store. Call it once the ranks have been forked."""
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
        """Open a listening socket, with no store behind it yet; return a world of this host alone."""
        self._end_attempt()
        listening = listening_socket(socket.AF_INET, self._address, self._port)
        assert listening.fileno() >= FIRST_FD
        self._listening = listening
        where = RendezvousStoreInfo(self._address, listening.getsockname()[1])
        return RendezvousInfo(dist.HashStore(), 0, 1, where)

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the launcher's store, and rank 0 opens none."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in torch's logs."""
        return "one-host"

    def get_run_id(self) -> str:
        """Return the id of this launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Return whether `set_closed` was called."""
        return self._closed

    def set_closed(self) -> None:
        """Mark the rendezvous as closed."""
        self._closed = True

    def num_nodes_waiting(self) -> int:
        """Return 0: no other host can join."""
        return 0

    def shutdown(self) -> bool:
        """Close the store."""
        self._end_attempt()
        return True
