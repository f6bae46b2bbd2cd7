"""A rank's log of the operations that it issues, with a rolling digest: ranks that have diverged have other digests.

``digest_i = hash(digest_{i-1}, operation_i)``, so a digest covers all operations up to its own. Digests of two ranks
agree before their first difference, and differ from there on. Three readers have a log each: the sentinel, which
compares those of all operations in the background; the engine, which compares its gathers and steps in the messages of
each backward; our own collectives, which send a piece of the digest, the topic, with their data.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Sequence

DIGEST_BYTES = 8
Entry = tuple[int, str, str]  # number of an operation, digest of all operations up to it in hex, and what it is


class OperationLog:
    """The operations that this rank has issued: their digest, and the last ``remembered`` of them."""

    def __init__(self, remembered: int) -> None:
        self.count = 0
        self.digest = bytes(DIGEST_BYTES)
        self._entries: deque[tuple[int, bytes, str]] = deque(maxlen=remembered)

    def add(self, line: str) -> bytes:
        """Append an operation that is about to be issued; return the digest."""
        self.digest = hashlib.blake2b(self.digest + line.encode(), digest_size=DIGEST_BYTES).digest()
        self._entries.append((self.count, self.digest, line))
        self.count += 1
        return self.digest

    def recent(self) -> list[Entry]:
        """Return the operations that are remembered, oldest first."""
        return [(number, digest.hex(), line) for number, digest, line in self._entries]


def first_difference(one: Iterable[Sequence], other: Iterable[Sequence]) -> Entry | None:
    """Return the first difference of two logs: ``(number, one's operation, other's operation)``; None if they agree."""
    there = {number: (digest, line) for number, digest, line in other}
    for number, digest, line in one:
        if number in there and there[number][0] != digest:
            return number, line, there[number][1]
    return None
