"""The rendezvous of several machines, for torch's elastic agent.

Each launcher has a thread that posts its heartbeat. The launcher that serves the meeting also forms the rounds
(`zeroshard.launch.rounds`), and serves the store through which the ranks of a round connect. Each round has a new
store. A store that outlives a restart still has the keys of the ranks that died; with one, 5 of 10 restarts after a
crash hung.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from zeroshard.launch.bound_tcp_store import open_store
from zeroshard.launch.rendezvous_address import RendezvousAddress
from zeroshard.launch.rounds import LOOK_S, Entry, Leader, Round, RoundStore

JOIN_TIMEOUT_S = 600  # how long a machine waits until enough others have come
READ_TIMEOUT_S = 60  # timeout of a launcher's requests to the store of the meeting
STORE_TIMEOUT_S = 600.0  # timeout of a rank's requests to the store of its round


class ManyHosts(RendezvousHandler):
    """The rendezvous handler of a launcher that is one of several.

    Args:
        meeting: where the machines meet.
        num_ranks: how many ranks this machine starts.
        run_id: id of this launch, the same on each machine.

    Attributes:
        current: the round that this machine is in, or was in last; None before the first.

    Raises:
        RendezvousConnectionError: nobody answers at the meeting's address, or another program uses its port.
    """

    def __init__(self, meeting: RendezvousAddress, num_ranks: int, run_id: str) -> None:
        self._run_id = run_id
        self._store, serves = _open(meeting)
        self._board = RoundStore(dist.PrefixStore(run_id, self._store))
        self._entry, self._posting = Entry(num_ranks=num_ranks), threading.Lock()
        self._ranks_store: dist.TCPStore | None = None
        self._address = meeting.own_address
        self._lost: BaseException | None = None
        self._left = threading.Event()
        self.current: Round | None = None
        try:
            self._own = self._board.new_machine()
            self._post()
        except (RuntimeError, OSError) as error:
            raise RendezvousConnectionError(str(error)) from error
        self._leader = (
            Leader(self._board, self._own, meeting.min_nodes, meeting.max_nodes, self._serve) if serves else None
        )
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        self._thread.start()

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for a round that is newer than this machine's last one and includes it; return its place in that round.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousConnectionError: the store does not answer any more.
            RendezvousTimeoutError: no round was under way for `JOIN_TIMEOUT_S`, because too few machines came.
        """
        wants = 1 if self.current is None else self.current.number + 1
        self._want(wants)
        deadline = time.monotonic() + JOIN_TIMEOUT_S
        while True:
            newest = self._newest()
            if self.is_closed():
                raise RendezvousClosedError
            if newest is not None and newest.number >= wants:
                if self._own in newest.machines:
                    return self._joined(newest)
                wants = newest.number + 1
                self._want(wants)
            if newest is not None and not newest.over:
                deadline = time.monotonic() + JOIN_TIMEOUT_S  # the others train; this machine waits as a spare
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            time.sleep(LOOK_S)

    def why_over(self) -> str:
        """Return why the ranks of this machine's round should stop; empty if they should continue."""
        newest = self._newest()
        if newest is None or self.current is None:
            return ""
        return newest.over or (
            "the others continue without this machine" if newest.number > self.current.number else ""
        )

    def leave(self) -> None:
        """Tell the other machines that this one ends, and stop its heartbeat."""
        with suppress(RuntimeError, OSError):  # if the store is gone, nobody is left to be told
            self._post(left=True)
        self._left.set()
        self._thread.join()
        self._ranks_store = None

    def _joined(self, newest: Round) -> RendezvousInfo:
        self.current = newest
        store = dist.PrefixStore(f"{self._run_id}/round{newest.number}", self._store)
        where = RendezvousStoreInfo(newest.address, newest.port)
        return RendezvousInfo(store, newest.machines.index(self._own), len(newest.machines), where)

    @property
    def first_rank(self) -> int:
        """The global rank of this machine's first rank, in its round."""
        assert self.current is not None, "this machine is in no round"
        return self.current.first_rank(self._own)

    def _want(self, number: int) -> None:
        try:
            self._post(wants=number)
        except (RuntimeError, OSError) as error:
            self._raise(error)

    def _newest(self) -> Round | None:
        if self._lost is not None:
            self._raise(self._lost)
        try:
            return self._board.round()
        except (RuntimeError, OSError) as error:
            self._raise(error)

    def _raise(self, error: BaseException) -> NoReturn:
        raise RendezvousConnectionError(str(error)) from error

    def _post(self, wants: int | None = None, *, left: bool = False) -> None:
        with self._posting:
            self._entry.heartbeat += 1
            self._entry.wants = wants or self._entry.wants
            self._entry.left = self._entry.left or left
            self._board.post(self._own, self._entry)

    def _send_heartbeats(self) -> None:
        """Post heartbeats until this machine leaves, and form rounds if it serves the meeting; runs on the thread."""
        try:
            while not self._left.wait(LOOK_S):
                self._post()
                if self._leader is not None:
                    self._leader.look()
        except (RuntimeError, OSError) as error:
            self._lost = error  # the next call of another thread raises it

    def _serve(self) -> tuple[str, int]:
        self._ranks_store = None  # closes the store of the previous round
        self._ranks_store = open_store(self._address, 0, serves=True, timeout_s=STORE_TIMEOUT_S)
        return self._address, self._ranks_store.port

    # -- what torch's agent asks ----------------------------------------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        """True: ranks use the store of the round, and rank 0 opens none."""
        return True

    def get_backend(self) -> str:
        """Return the name of this rendezvous in torch's logs."""
        return "many-hosts"

    def get_run_id(self) -> str:
        """Return the id of this launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Return whether the run has ended."""
        try:
            return self._board.closed()
        except (RuntimeError, OSError) as error:
            self._raise(error)

    def set_closed(self) -> None:
        """End the run: there will be no further round."""
        self._board.close()

    def num_nodes_waiting(self) -> int:
        """Return 1 if this machine's round is over, so that the agent restarts the ranks; else 0."""
        return int(bool(self.why_over()))

    def shutdown(self) -> bool:
        """End the run on all machines, and leave."""
        with suppress(RuntimeError, OSError):  # as in `leave`
            self._board.close()
        self.leave()
        return True


def _open(meeting: RendezvousAddress) -> tuple[dist.TCPStore, bool]:
    """Open the store at the meeting's address; return it, and whether this process serves it."""
    host, port = meeting.host, meeting.port
    try:
        try:
            return open_store(host, port, serves=meeting.serves, timeout_s=READ_TIMEOUT_S), meeting.serves
        except (OSError, RuntimeError):
            if not meeting.serves:
                raise
            # another launcher on this machine was faster
            return open_store(host, port, serves=False, timeout_s=READ_TIMEOUT_S), False
    except (OSError, RuntimeError) as error:
        raise RendezvousConnectionError(str(error)) from error
