"""Where ranks post text for each other without collectives, so that it works while a collective hangs."""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist


class Board(Protocol):
    """A key-value store in which ranks post UTF-8 text for each other; neither method may wait for another rank."""

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        ...

    def read(self, key: str) -> bytes | None:
        """A key's value, or None."""
        ...


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
