"""A name that nobody knows, answered with the nearest one that somebody does."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from zeroshard.errors import UserError


def unknown_name(field: str, given: str, known: Sequence[str]) -> UserError:
    """The error for ``given``, which is not in ``known``: names the nearest, and all of them."""
    near = get_close_matches(given, known, n=1, cutoff=0.5)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return UserError(field, f"{given!r} is unknown", f"{guess}choose one of {', '.join(known)}")
