"""A watch over ranks that no longer do the same: they are named within seconds, instead of hanging for minutes.

Every rank must issue the same operations in the same order. Where one does not (it skipped a layer, its data ran
out), a backend hangs, or worse, pairs one rank's gradients with another's weights without a word. So each rank keeps a
rolling digest of what it issued, ``digest_i = hash(digest_{i-1}, op, bytes, scope)``, and a thread beside the training
compares it with the other ranks' through a board: a key-value store, no collective, which works while the collectives
do not.

* Every `PULSE_S` a rank posts how far it is, with the digests of its last operations. A digest that differs from rank
  0's at the same place is a divergence, and the operations around it say where.
* A rank that has waited for longer than ``stall_s``, or whose GPU has got past no collective for so long
  (`zeroshard.comm.wrappers.under_way`), looks for one that has stopped posting: it is lost.

Whoever finds a fault posts it as the verdict, and every rank acts on that one.

[Note: What a stall asks of the store]
    One process serves the board, and in a stall all ranks look at once. If each looked at all others, 512 ranks would
    ask for 262,144 logs a second exactly when the store is needed. Beyond `FULL_LOOK` ranks each looks at rank 0 and
    at its own neighbours, who look at it too, so that whoever falls silent is noticed at once by somebody who lives;
    and at all ranks in turns, in which no more than `FULL_LOOK` ranks' worth of logs is read a second by each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from zeroshard.comm.base import Communicator, PeerError, Work
from zeroshard.comm.labels import current_scope
from zeroshard.comm.wrappers.under_way import UnderWay, Watched
from zeroshard.comm.wrappers.wrapper import WrappedWork, Wrapper

PULSE_S = 1.0
REMEMBERED = 128  # operations, on the board and in memory
LOST_AFTER_S = 8.0  # without a pulse
FULL_LOOK = 16  # ranks that each rank looks at once a second in a stall
NEIGHBOURS = 2  # on each side
NAMING_PULSES = 3  # after which a rank that was not heard of is to blame for a collective that failed

_VERDICT = "verdict"


class Board(Protocol):
    """Where ranks leave word (UTF-8 text) for each other; neither method may wait for another rank."""

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        ...

    def read(self, key: str) -> bytes | None:
        """A key's value, or None."""
        ...


class StoreBoard:
    """A board on a `torch.distributed` store, such as the one that the ranks met at."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("sentinel", store)
        self._there: set[str] = set()  # keys that were found; none is ever removed

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._store.set(key, value.decode())

    def read(self, key: str) -> bytes | None:
        """A key's value, or None; never waits for one."""
        if key not in self._there:
            if not self._store.check([key]):
                return None
            self._there.add(key)
        return self._store.get(key)


class _OperationLog:
    """What this rank issued: the last operations with their rolling digests."""

    def __init__(self) -> None:
        self.count = 0
        self._digest = b""
        self._entries: deque[tuple[int, str, str]] = deque(maxlen=REMEMBERED)

    def add(self, op: str, num_bytes: int, label: str) -> None:
        """Note an operation that is about to be issued."""
        line = f"{op} of {num_bytes} bytes for {label or 'no unit'}"
        self._digest = hashlib.blake2b(self._digest + line.encode(), digest_size=8).digest()
        self._entries.append((self.count, self._digest.hex(), line))
        self.count += 1

    def recent(self) -> list[tuple[int, str, str]]:
        """The last `REMEMBERED` operations: number, digest of all up to it, and what it was."""
        return list(self._entries)


def first_difference(one: list[tuple[int, str, str]], other: list[tuple[int, str, str]]) -> tuple[int, str, str] | None:
    """The first place where two logs have different operations: ``(place, one's, other's)``; None where none is.

    Digests roll, so all places after a difference differ; before it they agree.
    """
    there = {place: (digest, line) for place, digest, line in other}
    for place, digest, line in one:
        if place in there and there[place][0] != digest:
            return place, line, there[place][1]
    return None


class _Watch:
    """The thread beside one rank, its log of operations and the board."""

    def __init__(
        self, rank: int, world_size: int, board: Board, on_fault: Callable[[str, bool], None], stall_s: float
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self.log, self.under_way = _OperationLog(), UnderWay()
        self._board, self._on_fault, self._stall_s = board, on_fault, stall_s
        self._waiting_since: float | None = None
        self._last_pulse: dict[int, tuple[int, float]] = {}  # of each rank: its number, when it changed
        self._pulse = 0
        self._looking_since: float | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sentinel", daemon=True)
        self._thread.start()
        # a store that is cut off answers nothing for a quarter of an hour, and holds whoever asked it
        self._second = threading.Thread(target=self._watch_the_board, name="sentinel-board", daemon=True)
        self._second.start()

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """See `SentinelCommunicator.waiting`."""
        self._waiting_since = time.monotonic()
        try:
            yield
        except PeerError as error:
            fault = self._name_fault()
            self._let_others_hear()
            raise PeerError(fault or str(error)) from error
        finally:
            self._waiting_since = None

    def _watch(self) -> None:
        while not self._closed.wait(PULSE_S):
            self._looking_since = time.monotonic()
            try:
                fault = self._look()
            except (RuntimeError, OSError):  # the board is gone: its owner has ended, and so will this rank
                return
            finally:
                self._looking_since = None
            if fault:
                self._let_others_hear()
                self._on_fault(*fault)
                return

    def _watch_the_board(self) -> None:
        while not self._closed.wait(PULSE_S):
            looking, waiting, now = self._looking_since, self._stalled_since(), time.monotonic()
            if looking is None or waiting is None:
                continue
            if now - looking > LOST_AFTER_S and now - waiting > self._stall_s:
                what = f"rank 0, or its machine, has not answered for {LOST_AFTER_S:.0f} s: it is cut off"
                self._on_fault(what, True)
                return

    def _look(self) -> tuple[str, bool] | None:
        self._post()
        verdict = self._board.read(_VERDICT)
        if verdict is not None:
            return verdict.decode(), False
        fault = self._divergence([0]) if self.rank else None
        since = self._stalled_since()
        if fault is None and since is not None and time.monotonic() - since > self._stall_s:
            ranks = self._looked_at()
            fault = self._divergence(ranks) or self._lost(ranks)
        if fault is None:
            return None
        self._board.post(_VERDICT, fault.encode())
        return fault, True

    def _stalled_since(self) -> float | None:
        """Since when the host waits, or a GPU has got past no collective; None where neither is so."""
        on_device, on_host = self.under_way.stalled_since(time.monotonic()), self._waiting_since
        return on_device if on_host is None else on_host

    def _looked_at(self) -> list[int]:
        """The ranks to look at in this pulse: [Note: What a stall asks of the store]."""
        turns = -(-self.world_size // FULL_LOOK)
        if (self._pulse + self.rank) % turns == 0:
            return list(range(self.world_size))
        return self._near()

    def _near(self) -> list[int]:
        """Rank 0 and the neighbours; all ranks where those are few."""
        if self.world_size <= FULL_LOOK:
            return list(range(self.world_size))
        near = range(self.rank - NEIGHBOURS, self.rank + NEIGHBOURS + 1)
        return sorted({0, *(rank % self.world_size for rank in near)} - {self.rank})

    def _let_others_hear(self) -> None:
        """On rank 0, with which the board may go: give the others a few pulses to read the verdict."""
        with contextlib.suppress(RuntimeError, OSError):
            self._board.post(f"heard{self.rank}", b"1")
            for _ in range(NAMING_PULSES if self.rank == 0 else 0):
                if all(self._board.read(f"heard{rank}") for rank in range(self.world_size)):
                    break
                time.sleep(PULSE_S)

    def _post(self) -> None:
        self._pulse += 1
        posted = {"pulse": self._pulse, "count": self.log.count, "recent": self.log.recent()}
        self._board.post(f"rank{self.rank}", json.dumps(posted).encode())

    def _log_of(self, rank: int) -> list[tuple[int, str, str]]:
        posted = self._board.read(f"rank{rank}")
        if posted is None:
            return []
        content = json.loads(posted)
        if self._last_pulse.get(rank, (0, 0.0))[0] != content["pulse"]:
            self._last_pulse[rank] = (content["pulse"], time.monotonic())
        return [tuple(entry) for entry in content["recent"]]

    def _divergence(self, ranks: list[int]) -> str | None:
        own = self.log.recent()
        for rank in ranks:
            difference = first_difference(self._log_of(rank), own) if rank != self.rank else None
            if difference is not None:
                place, theirs, ours = difference
                return (
                    f"ranks diverged at operation {place}: rank {rank} issued {theirs}, rank {self.rank} issued {ours}"
                )
        return None

    def _lost(self, ranks: list[int]) -> str | None:
        now = time.monotonic()
        for rank in ranks:
            if rank != self.rank:
                self._log_of(rank)
                seen = self._last_pulse.setdefault(rank, (0, now))[1]
                if now - seen > LOST_AFTER_S:
                    return f"rank {rank} has not answered for {LOST_AFTER_S:.0f} s: it is stopped or lost"
        return None

    def _name_fault(self) -> str | None:
        """After a collective failed: what the board knows of it, or comes to know in a few pulses."""
        try:
            self._post()
            near = self._near()
            before = self._heard_of(near)
            for _ in range(NAMING_PULSES):
                time.sleep(PULSE_S)
                verdict = self._board.read(_VERDICT)
                fault = verdict.decode() if verdict is not None else self._divergence(near)
                if fault is not None:
                    return fault
            silent = [rank for rank, pulse in self._heard_of(near).items() if pulse == before[rank]]
            if silent:
                return self._tell_those_further_off(self._line_of_lost(silent[0]))
            return self._told_from_further_off()
        except (RuntimeError, OSError):
            return "rank 0, or the launcher, is gone: the store that it kept does not answer"

    def _tell_those_further_off(self, fault: str) -> str:
        """Ranks that do not look at the silent one read of it."""
        if self.world_size > FULL_LOOK:
            self._board.post(_VERDICT, fault.encode())
        return fault

    def _told_from_further_off(self) -> str | None:
        """What a rank that looks at others has found, where this one has found nobody silent."""
        for _ in range(NAMING_PULSES if self.world_size > FULL_LOOK else 0):
            time.sleep(PULSE_S)
            verdict = self._board.read(_VERDICT)
            if verdict is not None:
                return verdict.decode()
        return None

    def _heard_of(self, ranks: list[int]) -> dict[int, int]:
        """The number of the last pulse of these ranks, this one left out."""
        others = [rank for rank in ranks if rank != self.rank]
        for rank in others:
            self._log_of(rank)
        return {rank: self._last_pulse.get(rank, (0, 0.0))[0] for rank in others}

    def _line_of_lost(self, rank: int) -> str:
        recent = self._log_of(rank)
        last = (
            f"; when it was last heard of, it had issued {recent[-1][2]} as operation {recent[-1][0]}" if recent else ""
        )
        return f"rank {rank} is gone{last}; see what it printed"

    def close(self) -> None:
        """End the watch."""
        self._closed.set()
        self._thread.join()
        self._second.join()


class _WatchedWork(WrappedWork):
    def __init__(self, work: Work, sentinel: SentinelCommunicator, watched: Watched | None) -> None:
        super().__init__(work)
        self._sentinel, self._watched = sentinel, watched

    def wait(self) -> None:
        with self._sentinel.waiting():
            self._work.wait()
        if self._watched is not None:
            self._watched.waited()
            self._watched = None


class SentinelCommunicator(Wrapper):
    """``inner``, watched; its parts are under the same watch: all must do alike at the same time.

    Args:
        inner: the communicator to watch.
        board: shared by its ranks.
        on_fault: called on the watching thread with one line, which names the first rank and unit that differ or the
            rank that is lost, and with whether this rank was the one to find it. The caller may sit in a collective
            that never returns, so this must end the process or break the collective; raising is of no use there.
        stall_s: how long a wait may last before a silent rank is taken for lost.

    Call `close` at the end of training.
    """

    def __init__(
        self, inner: Communicator, board: Board, on_fault: Callable[[str, bool], None], *, stall_s: float = 8.0
    ) -> None:
        super().__init__(inner)
        self._watch = _Watch(inner.rank, inner.world_size, board, on_fault, stall_s)

    def waiting(self) -> AbstractContextManager[None]:
        """Around a wait: how long it lasts, and a fault's name where one is known by then."""
        return self._watch.waiting()

    def close(self) -> None:
        """End the watch."""
        self._watch.close()

    def _around(self, op: str, whole: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Note an operation and issue it."""
        num_bytes = 0 if whole is None else whole.nbytes
        self._watch.log.add(f"{op} {detail}".rstrip(), num_bytes, current_scope())
        with self.waiting():
            work = issue()
        watched = None if whole is None else self._watch.under_way.add(work, whole.device)
        return _WatchedWork(work, self, watched)


def is_of_peers(error: BaseException) -> bool:
    """Whether torch's own collectives or stores say that another rank is gone, or never came.

    gloo raises plain RuntimeErrors, which begin with the place in its source.
    """
    gloo = isinstance(error, RuntimeError) and re.search(r"gloo/|\[gloo\]|Gloo |by peer|Broken pipe", str(error))
    return bool(gloo) or isinstance(error, dist.DistError)


def peer_error_of(comm: Communicator | None, error: RuntimeError) -> PeerError | None:
    """What ``error`` means where collectives of torch's, which went around ``comm``, have raised it.

    It names the rank that is to blame where ``comm`` is under a sentinel's watch, which takes some pulses. None: the
    error is of no collective.
    """
    if isinstance(error, PeerError) or not is_of_peers(error):
        return None
    line = str(error).splitlines()[0]
    said = PeerError(f"a collective failed: a peer was lost or never came ({line})")
    while isinstance(comm, Wrapper) and not isinstance(comm, SentinelCommunicator):
        comm = comm.inner
    if isinstance(comm, SentinelCommunicator):
        try:
            with comm.waiting():
                raise said
        except PeerError as named:
            return named
    return said
