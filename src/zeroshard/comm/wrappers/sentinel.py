"""Detects ranks that diverge or stop: they are named within seconds, where a run would otherwise hang for minutes.

Every rank must issue the same operations in the same order. If one does not (it skipped a layer, its data ran out), a
backend hangs or, worse, silently combines one rank's gradients with another's weights. So each rank keeps a log with a
rolling digest of the operations that it issued (`zeroshard.comm.operation_log`), and a background thread compares it
with the other ranks' through a board. The board is a key-value store and uses no collectives, so it works while they
hang.

* Every `PULSE_S` a rank posts a pulse to the board: a counter, and its last operations with their digests. If a digest
  differs from rank 0's for the same operation number, the ranks have diverged, and the operations there say how.
* A rank whose host has waited, or whose GPU has completed no collective (`zeroshard.comm.wrappers.in_flight`), for
  longer than a quarter of ``stall_s`` looks for a rank that no longer posts pulses: after `LOST_AFTER_S` it is lost.

* Calls that every rank must make are in the log too (`zeroshard.comm.every_rank`). A rank that makes one alone is
  noticed like one that issues a collective alone.
* gloo's thread throws if a message is longer than the one that its rank expects, which would abort the process. It is
  held until the ranks have said why (`zeroshard.comm.wrappers.gloo_abort`).

The rank that finds a fault posts it on the board as the verdict, and all ranks act on the verdict.

[Note: Who waits for whom]
    A rank that does other work for long (sleeps, loads, computes) is no fault. But the lowest of the ranks that wait
    for it logs a line, once in a wait, with the line of the user's code at which it is. If all ranks that are behind
    are inside collectives of torch.distributed of all ranks, while this rank waits in one of ours, none can go on: that
    is a fault.

[Note: What a stall asks of the store]
    One process serves the board, and in a stall all ranks look at once. If each looked at all others, 512 ranks would
    ask for 262,144 logs a second exactly when the store is needed. Beyond `FULL_LOOK` ranks each rank looks at rank 0
    and at its own neighbours. Its neighbours look at it too, so a silent rank is noticed at once by one that is alive.
    Ranks also take turns to look at all others, so rarely that this adds `FULL_LOOK` logs a second for each at most.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager
from threading import Event
from typing import TypeVar

from torch import Tensor

from zeroshard.comm.base import Communicator, PeerError, Work, is_of_peers
from zeroshard.comm.labels import current_label
from zeroshard.comm.operation_log import OperationLog, first_difference
from zeroshard.comm.wrappers import gloo_abort
from zeroshard.comm.wrappers.board import Board, Page, page_of, verdict_of
from zeroshard.comm.wrappers.board import StoreBoard as StoreBoard
from zeroshard.comm.wrappers.in_flight import InFlight, Watched
from zeroshard.comm.wrappers.place import place_of_main_thread
from zeroshard.comm.wrappers.wrapper import WrappedWork, Wrapper
from zeroshard.host.finalizers import Finalizer

PULSE_S = 1.0
REMEMBERED = 128  # operations that are kept, in memory and on the board
LOST_AFTER_S = 8.0  # a rank without a new pulse for so long is lost
FULL_LOOK = 16  # up to so many ranks, each looks at all others at every pulse of a stall
NEIGHBOURS = 2  # how many neighbours on each side a rank looks at
CLOSING_S = 5.0  # how long `close` waits for requests to the board
HEARING_PULSES = 10  # for so many pulses rank 0 waits for the others to hear of a fault
NAMING_PULSES = 3  # a rank that posts nothing for so many pulses after a collective failed is to blame for that

OnFault = Callable[[str, bool], None]
_VERDICT = "verdict"
_log = logging.getLogger("zeroshard.comm")
T = TypeVar("T")


class _Watch:
    """One rank's watch: its log of operations, and the threads that post and compare it through the board."""

    def __init__(
        self,
        comm: Communicator,
        board: Board,
        on_fault: OnFault,
        stall_s: float,
        lost_after_s: float,
        raised: Event | None,
        on_wait: Callable[[str], None],
    ) -> None:
        self.rank, self.world_size = comm.rank, comm.world_size
        self.fault = ""  # what was found, by this rank or another
        self._named = ""  # what this rank has posted because a collective failed
        self._lost_after_s, self.raised = lost_after_s, raised
        self.log, self.under_way = OperationLog(REMEMBERED), InFlight()
        self._board, self._on_fault, self._stall_s, self._on_wait = board, on_fault, stall_s, on_wait
        self.met_another = Event()  # set by gloo's thread: a message of another operation has come
        self._waiting_since: float | None = None
        self._told_of: float | None = None  # of the last wait that a line was logged of: since when
        self._last_pulse: dict[int, tuple[int, float]] = {}  # by rank: number of its last pulse, and when we saw it
        self._pulse = 0
        self._place, self._place_since = place_of_main_thread(), time.monotonic()
        self._strange: set[str] = set()  # keys that hold what no rank of ours posts
        self._looking_since: float | None = None
        self._closed = Event()
        self._thread = threading.Thread(target=self._watch, name="sentinel", daemon=True)
        self._thread.start()
        # if the network to the store fails, a request to it blocks its thread for a quarter of an hour
        self._second = threading.Thread(target=self._watch_the_board, name="sentinel-board", daemon=True)
        self._second.start()
        gloo_abort.hold_for(self.met_another)

    @contextlib.contextmanager
    def waiting(self) -> Generator[None]:
        """See `SentinelCommunicator.waiting`."""
        self._waiting_since = time.monotonic()
        try:
            yield
        except PeerError as error:
            if self.raised is not None:
                self.raised.set()
            if str(error) == self.fault:  # others have heard of it
                raise
            self.fault = self.fault or self._name_fault() or str(error)
            self._let_others_hear()
            raise PeerError(self.fault) from error
        finally:
            self._waiting_since = None

    def _watch(self) -> None:
        while not self._closed.wait(PULSE_S):
            self._looking_since = time.monotonic()
            try:
                fault = self._look()
            except (RuntimeError, OSError):  # the board is gone: the process that served it has ended
                return
            finally:
                self._looking_since = None
            if fault:
                self._let_others_hear()
                self.fault = fault[0]  # not before others have heard: the main thread raises it, and may end the board
                self._on_fault(*fault)
                return

    def _watch_the_board(self) -> None:
        while not self._closed.wait(PULSE_S):
            looking, waiting, now = self._looking_since, self._stalled_since(), time.monotonic()
            if looking is None or waiting is None:
                continue
            limit_s = self._lost_after_s or LOST_AFTER_S
            if now - looking > limit_s and now - waiting > self._stall_s:
                self.fault = f"rank 0, or its machine, has not answered for {limit_s:.0f} s: it is cut off"
                self._on_fault(self.fault, True)
                return

    def _look(self) -> tuple[str, bool] | None:
        self._post()
        verdict = self._verdict()
        if verdict is not None:
            return verdict, verdict == self._named
        fault = self._divergence(self._pages([0])) if self.rank else None
        since = self._stalled_since()
        waited_s = 0.0 if since is None else time.monotonic() - since
        if fault is None and waited_s > self._stall_s / 4:  # from here on pulses are seen, so silence is measured
            pages = self._pages(self._looked_at())
            fault = self._divergence(pages) or self._lost(pages)
            if fault is None and waited_s > self._stall_s and len(pages) == self.world_size - 1:
                fault = self._blocked(pages, waited_s, since)
        if fault is None and self.met_another.is_set():
            place = place_of_main_thread()
            fault = self._name_fault() or f"ranks diverged: rank {self.rank} got a message of another operation {place}"
        if fault is None:
            return None
        self._post_verdict(fault)
        return fault, True

    def _post_verdict(self, fault: str) -> None:
        self._board.post(_VERDICT, json.dumps({"fault": fault}).encode())

    def _verdict(self) -> str | None:
        posted = self._board.read(_VERDICT)
        return None if posted is None else self._ours(_VERDICT, verdict_of(posted))

    def _ours(self, key: str, found: T | None) -> T | None:
        """Return what was found at a key; if it is nothing of ours, warn once. The watch goes on without it."""
        if found is None and key not in self._strange:
            self._strange.add(key)
            _log.warning("the ranks' store has a value at %s that no rank of this run has posted: ignored", key)
        return found

    def _stalled_since(self) -> float | None:
        """Return since when the host waits, or a GPU has completed no collective; None if neither is the case."""
        on_device, on_host = self.under_way.stalled_since(time.monotonic()), self._waiting_since
        return on_device if on_host is None else on_host

    def _looked_at(self) -> list[int]:
        """Return the ranks to look at in this pulse: [Note: What a stall asks of the store]."""
        turns = -(-self.world_size // FULL_LOOK)
        if (self._pulse + self.rank) % turns == 0:
            return list(range(self.world_size))
        return self._near()

    def _near(self) -> list[int]:
        """Return rank 0 and the neighbours; all ranks if there are no more than `FULL_LOOK`."""
        if self.world_size <= FULL_LOOK:
            return list(range(self.world_size))
        near = range(self.rank - NEIGHBOURS, self.rank + NEIGHBOURS + 1)
        return sorted({0, *(rank % self.world_size for rank in near)} - {self.rank})

    def _let_others_hear(self) -> None:
        """Post that this rank has the verdict. Rank 0, whose end may end the board, waits for those that post pulses.

        It waits for `HEARING_PULSES` at most, as a rank that computes meets no fault of a collective.
        """
        with contextlib.suppress(RuntimeError, OSError):
            self._board.post(f"heard{self.rank}", b"1")
            if self.rank:
                return
            deaf = list(range(1, self.world_size))
            pulses: list[dict[int, int]] = []  # as they were heard, the last ones
            while deaf and len(pulses) < HEARING_PULSES:
                deaf = [rank for rank in deaf if not self._board.read(f"heard{rank}")]
                pulses.append(self._heard_of(deaf))
                if len(pulses) > NAMING_PULSES:
                    deaf = [rank for rank in deaf if pulses[-1][rank] != pulses[-1 - NAMING_PULSES][rank]]
                if deaf:
                    time.sleep(PULSE_S)

    def _post(self) -> None:
        self._pulse += 1
        place, now = place_of_main_thread(), time.monotonic()
        if place != self._place:
            self._place, self._place_since = place, now
        page = Page(self._pulse, self.log.count, self.log.recent(), place, now - self._place_since)
        self._board.post(f"rank{self.rank}", json.dumps(page).encode())

    def _pages(self, ranks: Iterable[int]) -> dict[int, Page | None]:
        """Return what each of ``ranks`` but this one has posted last, and note when pulses were seen to change."""
        pages: dict[int, Page | None] = {}
        for rank in (rank for rank in ranks if rank != self.rank):
            key = f"rank{rank}"
            posted = self._board.read(key)
            pages[rank] = page = None if posted is None else self._ours(key, page_of(posted))
            if page is not None and self._last_pulse.get(rank, (0, 0.0))[0] != page.pulse:
                self._last_pulse[rank] = (page.pulse, time.monotonic())
        return pages

    def _divergence(self, pages: Mapping[int, Page | None]) -> str | None:
        own = self.log.recent()
        for rank, page in pages.items():
            difference = first_difference(page.recent, own) if page is not None else None
            if difference is not None:
                place, theirs, ours = difference
                calls = [issued.removeprefix("the call ") for issued in (theirs, ours) if issued.startswith("the call")]
                advice = f"; every rank has to call {' and '.join(calls)}" if calls else ""
                one, other = sorted([(rank, theirs), (self.rank, ours)])
                issued = f"rank {one[0]} issued {one[1]}, rank {other[0]} issued {other[1]}"
                return f"ranks diverged at operation {place}: {issued}{advice}"
        return None

    def _lost(self, ranks: Iterable[int]) -> str | None:
        now, limit_s = time.monotonic(), self._lost_after_s or LOST_AFTER_S
        for rank in ranks:
            seen = self._last_pulse.setdefault(rank, (0, now))[1]
            if now - seen > limit_s:
                return f"rank {rank} has not answered for {limit_s:.0f} s: it is stopped or lost"
        return None

    def _blocked(self, pages: Mapping[int, Page | None], waited_s: float, since: float | None) -> str | None:
        """Return why no rank can go on; if some may, tell once in a wait for whom: [Note: Who waits for whom].

        ``pages``: of all other ranks.
        """
        behind = {rank: page for rank, page in pages.items() if page is not None and page.count < self.log.count}
        if not behind:
            return None
        rank, page = next(iter(behind.items()))
        stuck = all(page.place.inside and page.still_s > self._stall_s for page in behind.values())
        if stuck and len(behind) == len(pages):
            return f"ranks diverged: {self._apart(rank, page)}"
        if self._told_of != since and all(other > self.rank for other in pages.keys() - behind.keys()):
            self._told_of = since
            more = f" (and {len(behind) - 1} more)" if len(behind) > 1 else ""
            self._on_wait(f"waiting for {waited_s:.0f} s{more}: {self._apart(rank, page)}")
        return None

    def _apart(self, rank: int, page: Page) -> str:
        """Say which operation of this rank another one has not issued, and where that one is."""
        number, _, line = next(entry for entry in self.log.recent() if entry[0] >= page.count)
        silent_s = time.monotonic() - self._last_pulse[rank][1]
        silent = f", and has posted nothing for {silent_s:.0f} s" if silent_s > NAMING_PULSES * PULSE_S else ""
        return f"rank {self.rank} issued {line} as operation {number}, rank {rank} has not and is {page.place}{silent}"

    def _name_fault(self) -> str | None:
        """Return why a collective failed, as far as the board shows within a few pulses; None if it does not."""
        try:
            self._post()
            near = self._near()
            before = self._heard_of(near)
            for _ in range(NAMING_PULSES):
                time.sleep(PULSE_S)
                fault = self._verdict() or self._divergence(self._pages(near))
                if fault is not None:
                    return fault
            silent = [rank for rank, pulse in self._heard_of(near).items() if pulse == before[rank]]
            if silent:
                fault = self._line_of_lost(silent[0])
                if self.world_size > FULL_LOOK:  # for ranks that do not look at the silent one
                    self._named = fault
                    self._post_verdict(fault)
                return fault
            for _ in range(NAMING_PULSES if self.world_size > FULL_LOOK else 0):  # one that looks there may tell
                time.sleep(PULSE_S)
                if (verdict := self._verdict()) is not None:
                    return verdict
            return None
        except (RuntimeError, OSError):
            return "rank 0, or the launcher, is gone: the store that it kept does not answer"

    def _heard_of(self, ranks: list[int]) -> dict[int, int]:
        """Return the number of the last pulse of each of ``ranks``, without this rank."""
        return {rank: self._last_pulse.get(rank, (0, 0.0))[0] for rank in self._pages(ranks)}

    def _line_of_lost(self, rank: int) -> str:
        page, last = self._pages([rank])[rank], ""
        if page is not None and page.recent:
            last = "; when it was last heard of, it had issued {2} as operation {0}".format(*page.recent[-1])
        return f"rank {rank} is gone{last}; see what it printed"

    def close(self) -> None:
        """End the watch's threads; may be called twice."""
        gloo_abort.hold_no_more(self.met_another)
        self._closed.set()
        for thread in {self._thread, self._second} - {threading.current_thread()}:
            thread.join(CLOSING_S)


class _WatchedWork(WrappedWork):
    def __init__(self, work: Work, sentinel: SentinelCommunicator, watched: Watched | None) -> None:
        super().__init__(work)
        self._sentinel, self._watched = sentinel, watched

    def wait(self) -> None:
        with self._sentinel.waiting():
            wait_for = getattr(self._work, "wait_for", None)
            while wait_for is not None and self._watched is None and not wait_for(PULSE_S):
                self._sentinel.require_no_fault()
            self._work.wait()
        if self._watched is not None:
            self._watched.waited()
            self._watched = None


class SentinelCommunicator(Wrapper):
    """``inner``, watched for ranks that diverge or are lost. Its parts log to the same watch: all must do alike.

    Args:
        inner: the communicator to watch.
        board: the board, shared by all ranks of ``inner``.
        on_fault: called on a background thread with one line, which names the first rank and operation that differ or
            the rank that is lost, and with whether this rank was the one to find it. The training thread may be blocked
            in a collective that never returns, so this must end the process or break the collective; raising has no
            effect there.
        stall_s: seconds after which a wait is a stall; this rank looks for silent ranks from a quarter of them on.
        lost_after_s: seconds after which a silent rank is lost; None: `LOST_AFTER_S`.
        raised: set when an operation, or a wait for one on the host, has raised a fault; None: they raise none that
            was found meanwhile.
        on_wait: called on a background thread with a line that says for whom this rank waits, once in a wait of more
            than ``stall_s``: [Note: Who waits for whom].

    The watch ends by `close`, with the last part of this one, or with the process.
    """

    def __init__(
        self,
        inner: Communicator,
        board: Board,
        on_fault: OnFault,
        *,
        stall_s: float = 8.0,
        lost_after_s: float | None = None,
        raised: Event | None = None,
        on_wait: Callable[[str], None] = lambda line: None,
    ) -> None:
        super().__init__(inner)
        self._watch = _Watch(inner, board, on_fault, stall_s, lost_after_s or 0.0, raised, on_wait)
        self._last: set[None] = set()  # shared with the parts: it goes with the last of them
        self._end = Finalizer(self._last, self._watch.close)

    def require_no_fault(self) -> None:
        """Raise PeerError if a fault was found, and operations are to raise it."""
        if self._watch.raised is not None and self._watch.fault:
            raise PeerError(self._watch.fault)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for a wait: the watch measures it, and a PeerError in it gets the fault's line if known."""
        return self._watch.waiting()

    def note_call(self, what: str) -> None:
        """Log a call that every rank must make; PeerError if a fault was found, and operations are to raise it."""
        self.require_no_fault()
        self._watch.log.add(f"the call {what}")

    def close(self) -> None:
        """End the watch."""
        self._end()

    def _around(self, op: str, unsharded: Tensor | None, issue: Callable[[], Work], detail: str = "") -> Work:
        """Log an operation and issue it."""
        num_bytes = 0 if unsharded is None else unsharded.nbytes
        what = f"{op} {detail}".rstrip()
        self._watch.log.add(f"{what} of {num_bytes} bytes for {current_label() or 'no unit'}")
        with self.waiting():
            self.require_no_fault()
            work = issue()
        watched = None if unsharded is None else self._watch.under_way.add(work, unsharded.device)
        return _WatchedWork(work, self, watched)


def sentinel_of(comm: Communicator | None) -> SentinelCommunicator | None:
    """Return the `SentinelCommunicator` among ``comm`` and what it wraps; None if there is none."""
    while isinstance(comm, Wrapper) and not isinstance(comm, SentinelCommunicator):
        comm = comm.inner
    return comm if isinstance(comm, SentinelCommunicator) else None


def peer_error_of(comm: Communicator | None, error: RuntimeError) -> PeerError | None:
    """Translate an ``error`` of collectives that torch ran itself, not through ``comm``, into a PeerError.

    If ``comm`` contains a `SentinelCommunicator`, the PeerError names the rank that is to blame; finding it takes some
    pulses. Returns None if ``error`` comes from no collective.
    """
    if isinstance(error, PeerError) or not is_of_peers(error):
        return None
    line = str(error).splitlines()[0]
    said = PeerError(f"a collective failed: a peer was lost or never came ({line})")
    sentinel = sentinel_of(comm)
    if sentinel is not None:
        try:
            with sentinel.waiting():
                raise said
        except PeerError as named:
            return named
    return said
