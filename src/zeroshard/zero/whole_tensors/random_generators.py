"""The random generators of this process, while an optimizer class is tried: seeded, and restored afterwards."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def borrowed_generators() -> Generator[None]:
    """After this block, restore every random generator that an optimizer may draw from."""
    numpy = _numpy_random()
    python_state, numpy_state = random.getstate(), numpy.get_state() if numpy else None
    try:
        with torch.random.fork_rng([]):
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.set_state(numpy_state)


def seed_generators(seed: int) -> None:
    """Seed every random generator that an optimizer on the CPU may draw from."""
    random.seed(seed)
    numpy = _numpy_random()
    if numpy:
        numpy.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device


def _numpy_random() -> Any:
    try:
        import numpy
    except ImportError:  # torch runs without numpy
        return None
    return numpy.random
