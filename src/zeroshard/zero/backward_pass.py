"""One run of autograd, as the engine follows it."""

from __future__ import annotations

import weakref

import torch

from zeroshard.zero.schedule import Cursor
from zeroshard.zero.unit import Unit


class Run:
    """A run of autograd, whose callback alone holds this; so it is gone when the run is, be it by an exception."""


class BackwardPass:
    """One run of autograd: which units take part, at which place, and how far the schedule has come."""

    def __init__(self, units: list[Unit], cursor: Cursor, run: Run) -> None:
        self.place = {unit: place for place, unit in enumerate(units)}
        self.cursor = cursor
        self._run = weakref.ref(run)
        # Then a backward through this backward may follow, which begins with reading weights and tells nobody.
        self.creates_graph = torch.is_grad_enabled()

    @property
    def failed(self) -> bool:
        """Whether an exception has ended it."""
        return self._run() is None
