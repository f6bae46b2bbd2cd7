"""How long the parts of a step take on their device; see `zeroshard.stopwatch`."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.stopwatch import Stopwatch


class Clock:
    """Adds up seconds by name. Spans of one name add up; they may be nested and then overlap.

    Args:
        device: whose time is meant.
        enabled: False: every span costs a call and leaves nothing.
    """

    def __init__(self, device: torch.device | str, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._on_cuda = torch.device(device).type == "cuda"
        self._watch = Stopwatch()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Count this block under ``name``; also where it ends by an exception."""
        return self._watch.span(name, on_cuda=self._on_cuda) if self.enabled else nullcontext()

    def take(self) -> dict[str, float]:
        """Seconds by name since the last `take`, of what the device has passed; the rest comes with a later one."""
        return self._watch.take()
