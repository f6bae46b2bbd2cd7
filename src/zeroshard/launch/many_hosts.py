"""Where the ranks of several machines meet: rounds, for torch's elastic agent.

Each launcher has a thread that posts its heartbeat; that of the launcher which serves the meeting also forms the rounds
(`zeroshard.launch.rounds`), and serves the store at which the ranks of a round meet. Each round has a new store. One
that outlives a restart still has the keys of the ranks that died, and 5 of 10 restarts after a crash hung with it.
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

from zeroshard.launch.machines import Meeting
from zeroshard.launch.meeting_store import open_store
from zeroshard.launch.rounds import LOOK_S, Entry, Leader, Round, RoundStore

JOIN_TIMEOUT_S = 600  # that a machine waits for the least number of others
READ_TIMEOUT_S = 60  # of a machine's question to the meeting
STORE_TIMEOUT_S = 600.0  # of a rank's question to the store of its round


class ManyHosts(RendezvousHandler):
    """The rendezvous of a launcher that is one of several.

    Args:
        meeting: of the machines.
        num_ranks: of this one.
        run_id: of this launch, the same on each machine.

    Raises:
        RendezvousConnectionError: nobody answers at the meeting's address, or its port is taken by another program.
    """

    def __init__(self, meeting: Meeting, num_ranks: int, run_id: str) -> None:
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
        """This machine's place in a round that is newer than the one it was in.

        Raises:
            RendezvousClosedError: the run has ended.
            RendezvousConnectionError: the store does not answer any more.
            RendezvousTimeoutError: there were too few machines for `JOIN_TIMEOUT_S`.
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
                deadline = time.monotonic() + JOIN_TIMEOUT_S  # others train, and this machine is spare
            if time.monotonic() > deadline:
                raise RendezvousTimeoutError
            time.sleep(LOOK_S)

    def why_over(self) -> str:
        """Why the ranks of this machine's round should not go on; empty where they should."""
        newest = self._newest()
        if newest is None or self.current is None:
            return ""
        return newest.over or ("the others go on without this machine" if newest.number > self.current.number else "")

    def leave(self) -> None:
        """Let the others know that this machine ends."""
        with suppress(RuntimeError, OSError):  # where the store is gone, nobody is left to be told
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
        """Of this machine, in its round."""
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
        """Post heartbeats until this machine leaves, and form rounds where it serves them; runs on the thread."""
        try:
            while not self._left.wait(LOOK_S):
                self._post()
                if self._leader is not None:
                    self._leader.look()
        except (RuntimeError, OSError) as error:
            self._lost = error  # for whoever asks next

    def _serve(self) -> tuple[str, int]:
        self._ranks_store = None  # of the round before: its port is closed
        self._ranks_store = open_store(self._address, 0, serves=True, timeout_s=STORE_TIMEOUT_S)
        return self._address, self._ranks_store.port

    # -- what torch's agent asks ----------------------------------------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        """Rank 0 opens no store: that of the round is the ranks'."""
        return True

    def get_backend(self) -> str:
        """What torch's logs call it."""
        return "many-hosts"

    def get_run_id(self) -> str:
        """Of this launch."""
        return self._run_id

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        try:
            return self._board.closed()
        except (RuntimeError, OSError) as error:
            self._raise(error)

    def set_closed(self) -> None:
        """No machine meets here any more."""
        self._board.close()

    def num_nodes_waiting(self) -> int:
        """More than 0 where this machine's round is over."""
        return int(bool(self.why_over()))

    def shutdown(self) -> bool:
        """The run has ended, on all machines."""
        with suppress(RuntimeError, OSError):  # as in `leave`
            self._board.close()
        self.leave()
        return True


def _open(meeting: Meeting) -> tuple[dist.TCPStore, bool]:
    """The store at the meeting's address, and whether it is served from here."""
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
