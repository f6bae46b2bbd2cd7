"""Import packages without the warnings that they log about optional dependencies."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any


def quiet_import(name: str) -> Any:
    """Import and return the module ``name``; warnings that it logs meanwhile are suppressed.

    Raises:
        ImportError: the module is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return import_module(name)
    finally:
        logging.disable(before)
