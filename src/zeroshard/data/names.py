"""The error for an unknown name, with the nearest known one."""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.errors import UserError, nearest_name


def unknown_name(field: str, given: str, known: Sequence[str]) -> UserError:
    """Return the error for ``given``, which is not in ``known``: it suggests the nearest name and lists all of them."""
    near = nearest_name(given, known)
    guess = "" if near is None else f"did you mean {near!r}? "
    return UserError(field, f"{given!r} is unknown", f"{guess}choose one of {', '.join(known)}")
