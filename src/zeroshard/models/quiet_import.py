"""Import packages without the warnings that they log about optional dependencies."""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from threading import Lock
from typing import Any


class _Quiet:
    """While any thread is inside, warnings are suppressed; the last to leave restores what the first one found.

    ``logging.disable`` counts for all threads. If each restored what it found, a thread that entered second and
    left last would switch all later warnings of the process off.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_inside = 0
        self._before = logging.NOTSET

    def __enter__(self) -> None:
        with self._lock:
            if self._num_inside == 0:
                self._before = logging.root.manager.disable
                logging.disable(logging.WARNING)
            self._num_inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0:
                logging.disable(self._before)


_quiet = _Quiet()


def quiet_import(name: str) -> Any:
    """Import and return the module ``name``; warnings that it logs meanwhile are suppressed.

    Ranks that are threads may import at the same time.

    Raises:
        ImportError: the module is not installed.
    """
    if name in sys.modules:
        return import_module(name)  # which waits for another thread that imports it
    with _quiet:
        return import_module(name)
