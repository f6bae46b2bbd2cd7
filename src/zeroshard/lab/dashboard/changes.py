"""Incremental updates of a page: only those pieces are sent that have changed since they were last sent.

The server keeps no state about a page. The page stores the *marks* of the pieces that it has, a short text for each
piece, and sends them with its next request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash import Patch, no_update


@dataclass(frozen=True)
class Part:
    """A part of a page: a frame, and pieces in it that can be replaced one by one.

    Attributes:
        marks: the mark of its frame, then the mark of each piece. If the frame's mark has changed, all of it is sent.
        whole: makes the complete part.
        replace: puts the piece of a number, from 0, into a patch; None: the part is only sent as a whole.
    """

    marks: Sequence[str]
    whole: Callable[[], Any]
    replace: Callable[[Any, int], None] | None = None

    def since(self, sent: Any) -> Any:
        """The update for a page that sent the marks ``sent``: nothing, a patch, or the complete part.

        ``sent`` comes from a browser and may be anything.
        """
        marks = list(self.marks)
        if sent == marks:
            return no_update
        if self.replace is None or not isinstance(sent, list) or len(sent) != len(marks) or sent[0] != marks[0]:
            return self.whole()
        patch = Patch()
        for number, (old, new) in enumerate(zip(sent[1:], marks[1:], strict=True)):
            if old != new:
                self.replace(patch, number)
        return patch


def mark(text: str) -> str:
    """A hash of ``text``."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def only_whole(text: str, make: Callable[[], Any]) -> Part:
    """A part that is only sent as a whole, whenever ``text`` has changed."""
    return Part([mark(text)], make)
