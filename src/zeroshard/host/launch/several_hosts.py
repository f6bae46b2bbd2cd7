"""The rendezvous of several machines: torch's c10d rendezvous, over a store at the endpoint's address alone.

Every launcher changes one shared state in that store (`DynamicRendezvousHandler`). What we set:

- A machine counts as lost after `LOST_S` without a heartbeat. torch compares the clocks of machines for this, so they
  must agree within a few seconds. The ranks of the other machines end before, once one of their collectives fails.
- A world begins `LAST_CALL_S` after enough machines have come, or at once if all have.
- Ranks do not share the launcher's store: rank 0 of each world serves a new one (`process_group.meet`). A store that
  outlives a restart still has the keys of the ranks that died, and torch's would listen on all interfaces.

torch pickles the shared state: whoever reaches the store can run code in the launchers.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Self

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from zeroshard.host.launch.bound_tcp_store import open_store
from zeroshard.host.launch.rendezvous_address import RendezvousAddress

JOIN_TIMEOUT_S = 600  # how long a machine waits until enough others have come
LAST_CALL_S = 3
HEARTBEAT_S = 2
LOST_S = 10
READ_TIMEOUT_S = 60  # timeout of a launcher's requests to the store


class SeveralHosts(DynamicRendezvousHandler):
    """The rendezvous handler of a launcher that is one of several; make it by `at`."""

    @classmethod
    def at(cls, rendezvous: RendezvousAddress, run_id: str) -> Self:
        """Serve the store of ``rendezvous``, or connect to it.

        Raises:
            RendezvousConnectionError: nobody answers at its address, or another program uses its port.
        """
        store = _open(rendezvous)
        return cls.from_backend(
            run_id,
            store,
            C10dRendezvousBackend(store, run_id),
            rendezvous.min_nodes,
            rendezvous.max_nodes,
            rendezvous.own_address,
            RendezvousTimeout(join=timedelta(seconds=JOIN_TIMEOUT_S), last_call=timedelta(seconds=LAST_CALL_S)),
            keep_alive_interval=HEARTBEAT_S,
            keep_alive_max_attempt=LOST_S // HEARTBEAT_S,
        )

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait for a new world; 0 if the store is gone: ranks may still end in good order."""
        try:
            return super().num_nodes_waiting()
        except RendezvousConnectionError:
            return 0


def _open(rendezvous: RendezvousAddress) -> dist.TCPStore:
    host, port = rendezvous.host, rendezvous.port
    try:
        try:
            return open_store(host, port, serves=rendezvous.serves, timeout_s=READ_TIMEOUT_S)
        except (OSError, RuntimeError):
            if not rendezvous.serves:
                raise
            # another launcher on this machine was faster
            return open_store(host, port, serves=False, timeout_s=READ_TIMEOUT_S)
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
