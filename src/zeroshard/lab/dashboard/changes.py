"""What a page must still be sent: the pieces that are not as when they were last sent.

The server remembers nothing of a page. The page keeps the *marks* of what it was sent, a text for each piece, and shows
them when it asks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dash import Patch, no_update


@dataclass(frozen=True)
class Part:
    """Part of a page.

    Attributes:
        marks: of its frame, and of each of its pieces. Where the frame's is another, all of it is sent.
        whole: makes all of it.
        replace: puts the piece of a number, from 0, into a patch; None: it is only sent whole.
    """

    marks: Sequence[str]
    whole: Callable[[], Any]
    replace: Callable[[Any, int], None] | None = None

    def since(self, sent: Any) -> Any:
        """What to send to a page that has these marks, or anything at all in their place."""
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
    """A short text for a long one."""
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def only_whole(text: str, make: Callable[[], Any]) -> Part:
    """A part of one piece, that is another where ``text`` is."""
    return Part([mark(text)], make)
