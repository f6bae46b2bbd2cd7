"""Where ranks post text for each other without collectives, so that it works while a collective hangs."""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

import torch.distributed as dist

from zeroshard.comm.operation_log import Entry
from zeroshard.comm.wrappers.place import Place

_NOT_OURS = (
    ValueError,
    TypeError,
    KeyError,
    OverflowError,
    RecursionError,
)  # what reading another program's value may raise


class Board(Protocol):
    """A key-value store in which ranks post UTF-8 text for each other; neither method may wait for another rank."""

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""

    def read(self, key: str) -> bytes | None:
        """A key's value, or None."""


class StoreBoard:
    """A board in a `torch.distributed` store, such as the ranks' rendezvous store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("sentinel", store)
        self._there: set[str] = set()  # keys known to exist; none is ever removed

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


class Page(NamedTuple):
    """What a rank posts at each pulse.

    ``still_s``: for how many seconds its main thread has been at ``place``.
    """

    pulse: int
    count: int
    recent: list[Entry]
    place: Place
    still_s: float


def page_of(posted: bytes) -> Page | None:
    """Return the page that a rank has posted as JSON; None for anything else, as others may write into a store."""
    try:
        pulse, count, recent, (at, inside), still_s = json.loads(posted)
        entries = [(int(number), str(digest), str(line)) for number, digest, line in recent]
        return Page(int(pulse), int(count), entries, Place(str(at), str(inside)), float(still_s))
    except _NOT_OURS:
        return None


def verdict_of(posted: bytes) -> str | None:
    """Return the fault that a rank has posted as ``{"fault": ...}``; None for anything else."""
    try:
        found = json.loads(posted)["fault"]
        return found if isinstance(found, str) else None
    except _NOT_OURS:
        return None
