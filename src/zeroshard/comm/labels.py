"""A label for what the caller is doing, which observers attach to each operation that they record.

The engine names its unit and phase (``"blocks.3/weights"``); it does not know who listens. Control messages, which
are a few bytes and no part of the training state's traffic, are labelled `CONTROL`.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

CONTROL = "control"
_label: ContextVar[str] = ContextVar("zeroshard_scope", default="")
_beside: ContextVar[bool] = ContextVar("zeroshard_beside", default=False)


@contextmanager
def scope(label: str) -> Generator[None]:
    """Label the operations issued in this block, on this thread."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def current_scope() -> str:
    """The innermost label, or ``""``."""
    return _label.get()


@contextmanager
def beside() -> Generator[None]:
    """What waits in this block, on this thread, is a stream of a device beside the one that computes."""
    token = _beside.set(True)
    try:
        yield
    finally:
        _beside.reset(token)


def is_beside() -> bool:
    """Whether this is inside `beside`, so that no computation stands still for what is waited for here."""
    return _beside.get()
