"""Calls that every rank must make: what is told to the watch, so that a rank that makes one alone is named.

Such a call may issue no collective (`Zero.ema`), or none at some stages (`Zero.state_dict` at stage 0), or one that
another rank's next one may be taken for. So it is an entry of its own in the log of operations that ranks compare in
the background (`zeroshard.comm.wrappers.sentinel`). An entry sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])


def call_of_every_rank(comm: Any, what: str) -> None:
    """Tell the watch of ``comm``, if it has one, that this rank makes a call that every rank must make.

    Raises:
        PeerError: the watch has found a fault meanwhile.
    """
    while comm is not None:
        note: Callable[[str], None] | None = getattr(comm, "note_call", None)
        if note is not None:
            note(what)
            return
        comm = getattr(comm, "inner", None)


def by_every_rank(method: Method) -> Method:
    """Note each call of a method that all ranks of its object's ``comm`` must call."""
    assert isinstance(method, FunctionType)
    name = method.__name__

    @wraps(method)
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        call_of_every_rank(self.comm, f"{type(self).__name__}.{name}")
        return method(self, *args, **kwargs)

    return cast(Method, noted)
