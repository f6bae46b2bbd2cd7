"""Trials of an optimizer class on tiny tensors, which leave nothing behind in this process.

[Note: One at a time]
    Ranks may be threads of one process, whose generators they share. And two threads must not read a generator's state
    at once: torch does so under a lock of its own, and if the garbage collector runs meanwhile, the thread that has
    that lock waits for the interpreter's, which the other one has while it waits for torch's.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

_in_use = threading.RLock()  # [Note: One at a time]


@contextmanager
def isolated() -> Generator[None]:
    """A block for trials on the CPU: autograd is on, and other threads wait for it.

    Afterwards every random generator that an optimizer may draw from is as it was before.
    """
    numpy = _numpy_random()
    with _in_use:
        python_state, numpy_state = random.getstate(), numpy.get_state() if numpy else None
        try:
            with torch.random.fork_rng([]), torch.device("cpu"), torch.inference_mode(False), torch.enable_grad():
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


def begin_training(optimizer: Optimizer) -> None:
    """Call ``train()`` of a class that has it: schedule-free optimizers refuse to step before."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()


def _numpy_random() -> Any:
    try:
        import numpy
    except ImportError:  # torch runs without numpy
        return None
    return numpy.random
