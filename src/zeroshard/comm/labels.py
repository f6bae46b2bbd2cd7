"""A label for what the caller is doing; `ObservedCommunicator` and others attach it to each operation they record.

The engine labels each collective with its unit and what it moves (``"blocks.3/weights"``), and does not know whether
anybody records it. Control messages are labelled `CONTROL`: a few bytes each, which carry no weights and no gradients.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

CONTROL = "control"
_label: ContextVar[str] = ContextVar("zeroshard_label", default="")
_beside: ContextVar[bool] = ContextVar("zeroshard_beside", default=False)


@contextmanager
def labelled(label: str) -> Generator[None]:
    """Label the operations issued in this block, on this thread."""
    token = _label.set(label)
    try:
        yield
    finally:
        _label.reset(token)


def current_label() -> str:
    """Return the innermost label, or ``""`` outside of `labelled`."""
    return _label.get()


@contextmanager
def on_side_stream() -> Generator[None]:
    """Mark this block, on this thread: a `Work.wait` in it makes a side stream wait, not the stream that computes."""
    token = _beside.set(True)
    try:
        yield
    finally:
        _beside.reset(token)


def is_on_side_stream() -> bool:
    """Return whether the caller is inside `on_side_stream`, so that a wait here does not block computation."""
    return _beside.get()
