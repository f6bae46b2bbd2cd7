"""Which machines take part in a run, round after round: the launcher that serves their meeting decides.

A *round* is one world of ranks, from one rendezvous to the next. It begins once every live machine has asked to take
part. It is over when one of its machines asks for a new round (one of its ranks has failed), when one sends no more
heartbeats, or when another machine asks to join and there is room. All of it is in the store at the endpoint:

    machine/3    heartbeat, the round that it waits for, its ranks: written by machine 3 alone, each `LOOK_S`
    round        number, machines, where their ranks meet, why it is over: written by the launcher that serves alone

So no two machines can decide differently, and no clocks are compared: a machine counts as lost once its heartbeat has
not changed for `SILENT_LOOKS` looks. (In torch's c10d rendezvous every machine changes one state and clocks are
compared; it takes 15 s to call a machine dead, and waits 10 s for more in each round.) The launcher that serves is in
every round, and first. A machine that ends normally ends no round: its ranks have told the others why they ended.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace

import torch.distributed as dist

LOOK_S = 0.25  # between two heartbeats, and two looks at all of them
SILENT_LOOKS = 20  # 5 s
FIRST_CALL_LOOKS = 40  # 10 s that the first round waits for more machines than it needs
MACHINE_CAME = "another machine has come"
MACHINE_SILENT = "a machine was lost"
RANK_LOST = "another machine has lost a rank"


@dataclass(frozen=True, slots=True)
class Round:
    """A world of ranks.

    Attributes:
        number: 1 or more, rising.
        machines: their numbers, in the order of their ranks.
        num_ranks: of each of them.
        address, port: of the store at which the ranks meet.
        over: why no rank of it should go on; empty while it is under way.
    """

    number: int
    machines: tuple[int, ...]
    num_ranks: tuple[int, ...]
    address: str
    port: int
    over: str = ""

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Round:
        """What `to_json` made."""
        facts = json.loads(text)
        return cls(**facts | {key: tuple(facts[key]) for key in ("machines", "num_ranks")})

    def first_rank(self, machine: int) -> int:
        """The rank of a machine's first one."""
        return sum(self.num_ranks[: self.machines.index(machine)])


@dataclass(slots=True)
class Entry:
    """What a machine writes about itself, and `Leader` reads.

    Attributes:
        heartbeat: a counter that its launcher increments for as long as it lives.
        wants: the lowest round number that it would join; above the newest round's number: it waits for another round.
        num_ranks: how many ranks it starts.
        left: whether its launcher has ended.
    """

    heartbeat: int = 0
    wants: int = 1
    num_ranks: int = 1
    left: bool = False

    def to_json(self) -> str:
        """As it is stored."""
        return json.dumps(asdict(self))


class RoundStore:
    """What machines and `Leader` write into the store at the endpoint; no method waits for another machine."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._there: set[str] = set()  # keys that were found; none is ever removed

    def new_machine(self) -> int:
        """A number for a machine that has just come."""
        return self._store.add("machines", 1) - 1

    def num_machines(self) -> int:
        """How many have ever come."""
        return self._store.add("machines", 0)

    def post(self, machine: int, entry: Entry) -> None:
        """A machine's own entry."""
        self._store.set(f"machine/{machine}", entry.to_json())

    def entry(self, machine: int) -> Entry | None:
        """A machine's; None where it has written none yet."""
        found = self._read(f"machine/{machine}")
        return None if found is None else Entry(**json.loads(found))

    def round(self) -> Round | None:
        """The newest round; None before the first."""
        found = self._read("round")
        return None if found is None else Round.from_json(found)

    def post_round(self, newest: Round) -> None:
        """The newest round, or what has become of it."""
        self._store.set("round", newest.to_json())

    def close(self) -> None:
        """There will be no further round."""
        self._store.set("closed", "1")

    def closed(self) -> bool:
        """Whether `close` was called, by any machine."""
        return self._read("closed") is not None

    def _read(self, key: str) -> bytes | None:
        if key not in self._there:
            if not self._store.check([key]):
                return None
            self._there.add(key)
        return self._store.get(key)


@dataclass(slots=True)
class Leader:
    """Forms rounds and ends them, in the launcher that serves the meeting; `look` does it, each `LOOK_S`.

    Args:
        board: where machines write.
        own: this machine's number.
        least, most: machines of a round.
        serve: opens a new store for ranks to meet at; its address and port.
    """

    board: RoundStore
    own: int
    least: int
    most: int
    serve: Callable[[], tuple[str, int]]
    _heartbeats: dict[int, tuple[int, int]] = field(default_factory=dict)  # by machine: its last, looks that it stayed
    _gone: set[int] = field(default_factory=set)  # these have left for good
    _looks_enough: int = 0  # since there were enough machines for the first round

    def look(self) -> None:
        """Read what machines have written, and decide."""
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
            return  # it still ends its ranks
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
        """The machines whose heartbeat has changed lately."""
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
        """Why the round cannot, or should not, go on; empty where it can."""
        there = [machine for machine in newest.machines if machine not in self._gone]
        if any(machine not in living for machine in there):
            return MACHINE_SILENT
        if any(living[machine].wants > newest.number for machine in there):
            return RANK_LOST
        waits = any(entry.wants > newest.number for entry in living.values())
        return MACHINE_CAME if waits and len(newest.machines) < self.most else ""
