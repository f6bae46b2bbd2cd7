"""Imports of packages that log what they look for and do not find."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any


def quiet_import(name: str) -> Any:
    """The module ``name``; warnings that it logs while it is imported are no news of a run.

    Raises:
        ImportError: it is not installed.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return import_module(name)
    finally:
        logging.disable(before)
