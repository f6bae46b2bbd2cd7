"""Measures how long the parts of a step take on their device; see `zeroshard.stopwatch`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.stopwatch import Stopwatch


class Clock:
    """Adds up seconds by name. Spans may be nested; their times then overlap.

    Args:
        device: the device whose time is measured.
        enabled: False: spans record nothing, and cost only a call.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._on_cuda = torch.device(device).type == "cuda"
        self._watch = Stopwatch()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Return a context whose time counts under ``name``, even if it ends by an exception."""
        return self._watch.span(name, on_cuda=self._on_cuda) if self.enabled else nullcontext()

    def take(self) -> dict[str, float]:
        """Return the seconds by name since the last `take`, of spans that the device has passed; others come later."""
        return self._watch.take()
