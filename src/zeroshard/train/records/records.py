"""What a run tells about itself, as facts, and what who listens must offer.

The loop makes one `StepRecord` a step and hands it to its observers; it knows none of them: the console (`console`),
``metrics.jsonl`` and ``summary.json`` (`log_files`), trackers. Whoever builds the observers builds them on rank 0
alone.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        step: counted from 1, after the update.
        loss: mean over the global batch, in nats per token.
        grad_norm: global, over all ranks, before clipping; infinite where a gradient is not finite.
        lr: of this step.
        step_s: wall time.
        tokens: of the global batch, all ranks together, since the run began.
        tokens_per_s: all ranks together.
        mfu: share of the devices' peak that the model's own arithmetic used; None where the peak is not
            known.
        memory_bytes: of this rank, by category ("params", "grads", "optimizer", ...); empty where not
            measured.
        comm: of this rank in this step, by operation; empty where not observed.
        skipped: whether no rank took the step: see `zeroshard.train.loop.step_guard`.
        why_skipped: ``"overflow"`` (of float16 on some rank), ``"not finite"`` or ``"spike"``; empty where taken.
        num_skipped: steps skipped since the run began.
        loss_scale: of this step; None where the loss is not scaled.
        exposed_s: seconds that this rank's computation stood still for communication, by unit, what was sent and
            phase ("blocks.3/weights/backward", ..., "control"); empty where not observed. On CUDA what the device has
            not reached yet is in the next step's.
        spans_s: seconds of this rank's step by part: "data", "forward", "backward", "clip", "update"; on CUDA as
            ``exposed_s``.
        meeting: of replicas that take local steps, where differences left or arrived: ``sent`` and ``arrived``
            (fragments), ``num_bytes`` and ``difference_norm`` of what arrived, ``num_replicas``, and, where something
            arrived, ``loss``, the mean of this step over all replicas; empty elsewhere. The other numbers are then the
            first replica's.
        hfu: as ``mfu``, with what activation checkpointing computes again; None where it is the same, or unknown.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    step_s: float
    tokens: int
    tokens_per_s: float
    mfu: float | None = None
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    comm: Mapping[str, Any] = field(default_factory=dict)
    skipped: bool = False
    why_skipped: str = ""
    num_skipped: int = 0
    loss_scale: float | None = None
    exposed_s: Mapping[str, float] = field(default_factory=dict)
    spans_s: Mapping[str, float] = field(default_factory=dict)
    hfu: float | None = None
    meeting: Mapping[str, Any] = field(default_factory=dict)


class Observer(Protocol):
    """Told of everything that a run does, in order; `close` comes last and always."""

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run begins or goes on; `info` holds what is fixed during it."""
        ...

    def on_step(self, record: StepRecord) -> None:
        """A step is done."""
        ...

    def on_eval(
        self, step: int, loss: float, ema_loss: float | None = None, named: Mapping[str, float] | None = None
    ) -> None:
        """The validation loss after `step`, in nats per token; that of the moving average, where one is kept.

        ``named``: of further validation sets, by name.
        """
        ...

    def on_saving(self, done_bytes: int, num_bytes: int) -> None:
        """A checkpoint is being written: so much of this rank's part is."""
        ...

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """A checkpoint of `step` is complete; `facts`: bytes and seconds."""
        ...

    def on_checkpoint_failed(self, step: int, path: Path, error: str) -> None:
        """A checkpoint of `step` could not be written, and the run goes on."""
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The run is done."""
        ...

    def close(self) -> None:
        """Let go of files and the terminal; may be called twice."""
        ...


def warn(line: str) -> None:
    """Say on stderr what an observer cannot do any more; the run goes on."""
    print(f"warning: {line}", file=sys.stderr, flush=True)
