"""Decides which machines take part in a run, round after round; the launcher that serves their meeting does this.

A *round* is one world of ranks, from one rendezvous to the next. It begins when enough machines have asked for it, and
every live machine of the round before has. It is over when one of its machines asks for a new round (one of its ranks
has failed), when one sends no more heartbeats, or when another machine asks to join and there is room. All of this is
in the store at the endpoint:

    machine/3    heartbeat, the round that it waits for, its ranks: only machine 3 writes it, every `LOOK_S`
    round        number, machines, address of its store, why it is over: only the launcher that serves writes it

So machines cannot decide differently, and no clocks are compared: a machine counts as lost once its heartbeat has not
changed for `SILENT_LOOKS` looks. (In torch's c10d rendezvous every machine changes one shared state and clocks are
compared; it takes 15 s to call a machine dead, and waits 10 s for more machines in each round.) The launcher that
serves is in every round, and its ranks come first. A machine that ends normally does not end the round: its ranks have
told the others why they ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

LOOK_S = 0.25  # between two heartbeats of a machine, and between two calls of `Leader.look`
SILENT_LOOKS = 20  # 5 s without a new heartbeat: the machine is lost
FIRST_CALL_LOOKS = 40  # 10 s for which the first round waits for more machines than it needs
MACHINE_CAME = "another machine has come"
MACHINE_SILENT = "a machine was lost"
RANK_LOST = "another machine has lost a rank"


@dataclass(frozen=True, slots=True)
class Round:
    """One world of ranks.

    Attributes:
        number: number of the round: 1, 2, ...
        machines: numbers of its machines, in the order of their ranks.
        num_ranks: how many ranks each of these machines has.
        address: address of the store through which the ranks connect.
        port: port of that store.
        over: why all its ranks should stop; empty while it is under way.
    """

    number: int
    machines: tuple[int, ...]
    num_ranks: tuple[int, ...]
    address: str
    port: int
    over: str = ""

    def to_json(self) -> str:
        """Return it as it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Round:
        """Parse the output of `to_json`."""
        facts = json.loads(text)
        return cls(**facts | {key: tuple(facts[key]) for key in ("machines", "num_ranks")})

    def first_rank(self, machine: int) -> int:
        """Return the global rank of a machine's first rank."""
        return sum(self.num_ranks[: self.machines.index(machine)])


@dataclass(slots=True)
class Entry:
    """The entry that a machine writes about itself, and that `Leader` reads.

    Attributes:
        heartbeat: a counter that its launcher increments for as long as it lives.
        wants: the lowest number of a round that it would join. If this is above the newest round's number, the machine
            waits for a new round.
        num_ranks: how many ranks the machine starts.
        left: whether its launcher has ended.
    """

    heartbeat: int = 0
    wants: int = 1
    num_ranks: int = 1
    left: bool = False

    def to_json(self) -> str:
        """Return it as it is stored."""
        return json.dumps(asdict(self))


class RoundStore:
    """The keys of machines and `Leader` in the store at the endpoint; no method waits for another machine."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._there: set[str] = set()  # keys known to exist; none is ever removed

    def new_machine(self) -> int:
        """Return a number for a machine that has just come: 0, 1, ..."""
        return self._store.add("machines", 1) - 1

    def num_machines(self) -> int:
        """Return how many machines have ever come."""
        return self._store.add("machines", 0)

    def post(self, machine: int, entry: Entry) -> None:
        """Write a machine's entry; only that machine does."""
        self._store.set(f"machine/{machine}", entry.to_json())

    def entry(self, machine: int) -> Entry | None:
        """Return a machine's entry; None if it has written none yet."""
        found = self._read(f"machine/{machine}")
        return None if found is None else Entry(**json.loads(found))

    def round(self) -> Round | None:
        """Return the newest round; None before the first."""
        found = self._read("round")
        return None if found is None else Round.from_json(found)

    def post_round(self, newest: Round) -> None:
        """Write the newest round, or write it again with the reason why it is over."""
        self._store.set("round", newest.to_json())

    def close(self) -> None:
        """Announce that there will be no further round."""
        self._store.set("closed", "1")

    def closed(self) -> bool:
        """Return whether any machine has called `close`."""
        return self._read("closed") is not None

    def _read(self, key: str) -> bytes | None:
        if key not in self._there:
            if not self._store.check([key]):
                return None
            self._there.add(key)
        return self._store.get(key)


@dataclass(slots=True)
class Leader:
    """Begins and ends rounds, in the launcher that serves the meeting; it calls `look` every `LOOK_S`.

    Args:
        board: the store in which machines write their entries.
        own: this machine's number.
        least: the least number of machines in a round.
        most: the most machines in a round.
        serve: opens a new store for the ranks of a round; returns its address and port.
    """

    board: RoundStore
    own: int
    least: int
    most: int
    serve: Callable[[], tuple[str, int]]
    _heartbeats: dict[int, tuple[int, int]] = field(default_factory=dict)  # by machine: its last, and its age in looks
    _gone: set[int] = field(default_factory=set)  # machines that have left for good
    _looks_enough: int = 0  # looks in a row at which enough machines waited for a round

    def look(self) -> None:
        """Read all machines' entries; end the round, or begin the next one, if it is time."""
        living, newest = self._living(), self.board.round()
        if newest is not None and not newest.over:
            why = self._why_over(newest, living)
            if why:
                self.board.post_round(replace(newest, over=why))
            return
        number = 0 if newest is None else newest.number
        members = () if newest is None else newest.machines
        waiting = [machine for machine, entry in living.items() if entry.wants > number]
        if any(machine in living and machine not in waiting for machine in members):
            return  # it is still ending its ranks of the last round
        if self.own not in waiting or len(waiting) < self.least:
            self._looks_enough = 0
            return
        self._looks_enough += 1
        if newest is None and len(waiting) < self.most and self._looks_enough <= FIRST_CALL_LOOKS:
            return
        order = sorted(waiting, key=lambda each: (each != self.own, each not in members, each))[: self.most]
        ranks = tuple(living[machine].num_ranks for machine in order)
        self.board.post_round(Round(number + 1, tuple(order), ranks, *self.serve()))

    def _living(self) -> dict[int, Entry]:
        """Return the machines that have not left and whose heartbeat has changed in the last `SILENT_LOOKS` looks."""
        found = {}
        for machine in range(self.board.num_machines()):
            entry = None if machine in self._gone else self.board.entry(machine)
            if entry is None:
                continue
            if entry.left:
                self._gone.add(machine)
                continue
            heartbeat, looks = self._heartbeats.get(machine, (-1, 0))
            looks = looks + 1 if heartbeat == entry.heartbeat else 0
            self._heartbeats[machine] = entry.heartbeat, looks
            if looks < SILENT_LOOKS:
                found[machine] = entry
        return found

    def _why_over(self, newest: Round, living: dict[int, Entry]) -> str:
        """Return why the round is over; empty if it can continue."""
        there = [machine for machine in newest.machines if machine not in self._gone]
        if any(machine not in living for machine in there):
            return MACHINE_SILENT
        if any(living[machine].wants > newest.number for machine in there):
            return RANK_LOST
        waits = any(entry.wants > newest.number for entry in living.values())
        return MACHINE_CAME if waits and len(newest.machines) < self.most else ""
