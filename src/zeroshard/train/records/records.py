"""`StepRecord`, the facts about one step, and `Callback`, the interface of everything in a run that is not training.

The loop takes steps (`zeroshard.train.loop.loop`), makes one `StepRecord` of each, and tells the run's callbacks of it:
profiler, average of the weights, outer steps, plan, log files, console, trackers, those of users, skipped steps,
evaluation, saving. Every rank has them, but only rank 0 has log files, console and trackers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.host.errors import ExitStatus, UserError


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


@dataclass(slots=True)
class Update:
    """A step whose update is done, or was skipped, before its record is made: `Callback.on_update` may add to it."""

    step: int  # counted from 1
    loss: float  # as in `StepRecord`, and so are the next two
    memory_bytes: Mapping[str, int]
    taken: bool
    stop: ExitStatus  # why the ranks that step together want to stop after it; OK: they do not
    outer_step: Mapping[str, Any] = field(default_factory=dict)


class Callback:
    """Takes part in a run beside its steps: subclass it with the methods of the events that you need.

    Every rank has one and calls the same method at the same time, so a method may be collective. ``on_step`` and
    ``on_eval`` may return True: the run then ends after this step, evaluated and saved as after ``max_steps``.

    Attributes:
        run: the `zeroshard.train.loop.run.Run`, of a class without an ``__init__`` of its own.
    """

    def __init__(self, run: Any = None) -> None:
        self.run = run

    def on_start(self, info: Mapping[str, Any]) -> None:
        """The run starts or resumes; ``info`` has the facts that do not change during the run."""

    def before_step(self, step: int) -> None:
        """Step number ``step``, counted from 1, begins."""

    def on_update(self, update: Update) -> None:
        """The weights were updated, or the step is skipped; gradients are cleared. Its time counts as the step's."""

    def on_step(self, record: StepRecord) -> bool | None:
        """A step is completed, taken or skipped."""

    def on_eval(self, step: int, losses: Mapping[str, float]) -> bool | None:
        """An evaluation after ``step`` steps is done.

        ``losses``, in nats per token: ``val_loss``; ``ema_val_loss``, of the moving average of the weights, if there is
        one; and ``val_loss/NAME`` of each further validation set.
        """

    def on_checkpoint(self, step: int, path: Path, facts: Mapping[str, Any] | None = None) -> None:
        """The checkpoint of ``step`` is complete, or could not be written, and the run continues.

        ``facts``: its bytes, and the seconds that it took; or why it was not written, as ``error``.
        """

    def before_end(self, summary: dict[str, Any]) -> None:
        """No step follows; complete what is under way, and add to the ``summary``."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """The training loop has ended other than by an exception; ``summary`` is the result."""

    def close(self) -> None:
        """Close files and restore what was changed; called however the run ended, may be called twice."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs of it, as JSON-serialisable values; saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; called before `on_start`."""


def states_of(callbacks: Iterable[Callback]) -> dict[str, Any]:
    """Return the states of those that have one, by the class as ``module:Class``, for a checkpoint.

    Raises:
        UserError: a state has no form in JSON.
    """
    states: dict[str, Any] = {}
    for address, state in ((address_of(type(each)), each.state_dict()) for each in callbacks):
        try:
            states |= {address: json.loads(json.dumps(state))} if state else {}  # a copy, as it is written later
        except (TypeError, ValueError) as error:
            what = f"{address}.state_dict() cannot be saved as JSON ({error})"
            raise UserError("callback", what, "return numbers, text, lists and dicts of them") from None
    return states


def address_of(kind: type[Callback]) -> str:
    """The class as ``module:Class``."""
    return f"{kind.__module__}:{kind.__qualname__}"
