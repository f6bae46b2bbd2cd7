"""`StepRecord`, the facts about one step, and `Observer`, the interface of everything that logs a run.

The loop makes one `StepRecord` per step and passes it to the run's observers through this interface: the console
(`console`), ``metrics.jsonl`` and ``summary.json`` (`log_files`), and trackers (`trackers`). Only rank 0 has observers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. With local steps its numbers are the first replica's."""

    step: int  # counted from 1
    loss: float  # mean over the global batch, in nats per token
    grad_norm: float  # over all ranks, before clipping; infinite or NaN if a gradient has a NaN/Inf
    lr: float
    step_s: float
    tokens: int  # trained on since the run began, of all ranks together
    tokens_per_s: float  # of all ranks together
    mfu: float | None = None  # share of the devices' peak that the model's own FLOPs use; None: the peak is unknown
    # resident bytes of this rank by category ("params", "grads", "optimizer", ...)
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    comm: Mapping[str, Any] = field(default_factory=dict)  # bytes of this rank's collectives, by operation
    skipped: bool = False  # on all ranks: see `zeroshard.train.loop.step_guard`
    why_skipped: str = ""  # ``"overflow"`` (of float16 on some rank) or ``"not finite"``
    num_skipped: int = 0  # since the run began
    loss_scale: float | None = None
    # seconds for which this rank's computation waited for communication, by unit, kind and phase
    # ("blocks.3/weights/backward", ..., "control"); on CUDA, time that the device has not reached yet counts later
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    # seconds of this rank's step by part: "data", "forward", "backward", "clip", "update", "outer_step"
    spans_s: Mapping[str, float] = field(default_factory=dict)
    hfu: float | None = None  # as ``mfu``, with the FLOPs that activation checkpointing recomputes
    # after an outer step: the fragments whose differences ``arrived``, ``num_bytes`` and ``difference_norm`` of these,
    # ``num_replicas``, and the mean ``loss`` over all replicas
    outer_step: Mapping[str, Any] = field(default_factory=dict)


def is_on_disk(category: str) -> bool:
    """Whether what is counted under this category of ``memory_bytes`` is in a file, and takes no memory."""
    return category.startswith("disk_")


def in_memory(memory_bytes: Mapping[str, int]) -> int:
    """The bytes of ``memory_bytes`` that are in memory, of all categories together."""
    return sum(num_bytes for category, num_bytes in memory_bytes.items() if not is_on_disk(category))


class Observer(Protocol):
    """Interface of everything that logs a run; methods are called in the order of events, and `close` always last."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run starts or resumes; ``info`` has the facts that do not change during the run."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step is completed, taken or skipped."""
        ...

    def on_eval(self, step: int, losses: Mapping[str, float]) -> None:
        """An evaluation after ``step`` steps is done.

        ``losses``, in nats per token: ``val_loss``; ``ema_val_loss``, of the moving average of the weights, if there is
        one; and ``val_loss/NAME`` of each further validation set.
        """
        ...

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """The checkpoint of ``step`` is complete, or could not be written, and the run continues.

        ``facts``: its bytes, and the seconds that it took; or why it was not written, as ``error``.
        """
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The training loop has ended other than by an exception; ``summary`` is the result."""
        ...

    def close(self) -> None:
        """Close files and restore the terminal; may be called twice."""
        ...
