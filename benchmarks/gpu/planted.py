"""Rows of a rehearsal that fail, hang, run out of memory and are killed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch


def planted_failure(budget: object, say: Callable[..., None]) -> None:
    """Fails after a result."""
    say(case="before it fails")
    raise RuntimeError("a planted failure")


def planted_hang(budget: object, say: Callable[..., None]) -> None:
    """Never ends."""
    while True:
        time.sleep(1)


def planted_out_of_memory(budget: object, say: Callable[..., None]) -> None:
    """Asks for more than any machine has."""
    torch.empty(2**60, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")


def planted_kill(budget: object, say: Callable[..., None]) -> None:
    """Dies without a word."""
    os.kill(os.getpid(), 9)
