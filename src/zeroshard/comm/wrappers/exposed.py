"""Exposed communication: the time for which computation waits for communication. Overlapped communication is free.

[Note: Two clocks]
    For CPU tensors, exposed time is the time that the caller's thread spends in the call that issues an operation, and
    in `Work.wait`. On CUDA neither blocks the host. There the computing stream waits, and the time is measured between
    two events recorded on it before and after `Work.wait`. Events are read after the device has passed them, perhaps a
    step later. Nobody waits for that, so measuring does not synchronise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from zeroshard.comm.labels import CONTROL, is_on_side_stream
from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.host.torch_internals import in_backward


class Exposed:
    """Adds up the seconds for which the caller's computation waited, by label and phase.

    A key is the label under which an operation was issued, and the phase in which it was waited for:
    ``blocks.3/weights/backward`` inside autograd's backward, else ``blocks.3/weights/forward``. All control messages
    count as ``control``.
    """

    def __init__(self) -> None:
        self._watch = Stopwatch()

    def timed(self, label: str, device: torch.device, *, issuing: bool = False) -> AbstractContextManager[None]:
        """Count the time of this block as exposed, for an operation on ``device``'s tensors.

        ``issuing``: the block issues the operation rather than wait for it, which on CUDA costs no time on the device.
        """
        if device.type == "cuda" and (issuing or is_on_side_stream()):  # [Note: Two clocks]
            return nullcontext()
        return self._watch.span(with_phase(label), device)

    def take_seconds(self) -> dict[str, float]:
        """Return the seconds by label since the last call, of spans that the device has passed; others come later."""
        return self._watch.take_seconds()


def by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    """Sum over units: seconds by ``weights/forward``, ``weights/backward``, ``grads/backward``, ``control``, ..."""
    total: defaultdict[str, float] = defaultdict(float)
    for label, value in seconds.items():
        total["/".join(label.split("/")[-2:])] += value
    return dict(total)


def with_phase(label: str) -> str:
    """Append the current phase, ``forward`` or ``backward``, to a label; ``control`` is returned unchanged."""
    if label == CONTROL:
        return label
    phase = "backward" if in_backward() else "forward"
    return f"{label or 'other'}/{phase}"
