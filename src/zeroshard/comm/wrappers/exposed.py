"""Exposed communication: how long computation stood still for it, which is all of it that costs anything.

[Note: Two clocks]
    Where tensors are on the CPU, the caller's own thread is what stands still: in the call that issues an operation,
    and in `Work.wait`. On CUDA neither blocks the host; the stream that computes is what waits, between two events
    recorded on it before and after `Work.wait`. Events are read once the device has passed them, be it a step later,
    and nobody waits for that: measuring synchronises nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.comm.labels import CONTROL, is_beside
from zeroshard.stopwatch import Stopwatch


class Exposed:
    """Collects the seconds that a caller's computation stood still, by label and phase.

    A label is the scope under which an operation was issued, and where it was waited for: ``blocks.3/weights/backward``
    inside autograd's backward, else ``blocks.3/weights/forward``. Control messages are all one, ``control``.
    """

    def __init__(self) -> None:
        self._watch = Stopwatch()

    def timed(self, label: str, device: torch.device, *, issuing: bool = False) -> AbstractContextManager[None]:
        """Count the time that this block has computation on ``device`` stand still; ``issuing``: it does not wait."""
        on_cuda = device.type == "cuda"
        if on_cuda and (issuing or is_beside()):
            return nullcontext()
        return self._watch.span(with_phase(label), on_cuda=on_cuda)

    def take(self) -> dict[str, float]:
        """Seconds by label since the last `take`, of what the device has passed; the rest comes with a later one."""
        return self._watch.take()


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sums over units: ``weights/forward``, ``weights/backward``, ``grads/backward``, ``control``, ..."""
    total: defaultdict[str, float] = defaultdict(float)
    for label, value in seconds.items():
        total["/".join(label.split("/")[-2:])] += value
    return dict(total)


def with_phase(label: str) -> str:
    """A scope's label with what autograd is doing now; ``control`` stays one."""
    if label == CONTROL:
        return label
    phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
    return f"{label or 'other'}/{phase}"
