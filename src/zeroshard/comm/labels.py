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
