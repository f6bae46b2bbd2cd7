"""`Run`: everything that the training loop needs. `zeroshard.train.setup.build` builds it from a configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import Communicator, ObservedCommunicator
from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.data import Batches
from zeroshard.data.base import EvalBatch
from zeroshard.host.errors import ExitStatus
from zeroshard.optim import LossScaler
from zeroshard.parallel import Strategy
from zeroshard.train.loop.best_loss import BestLoss
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.train.loop.stopping import STOPPED
from zeroshard.train.profiling.flops import Speed
from zeroshard.train.records.plan_contract import Contract
from zeroshard.train.records.records import Callback
from zeroshard.train.state.lock import RunLock
from zeroshard.zero import OuterSteps


@dataclass(frozen=True)
class Corpus:
    """One rank's part of a run's data."""

    batches: Batches
    eval_batches: Iterable[EvalBatch]
    vocab_size: int  # all token ids are below it
    eos_id: int | None  # the token id that ends each document
    sha256: str  # equal if and only if the same data is trained on
    keep_tokenizer: Callable[[Path], None]  # saves the tokenizer, without the data, into a folder
    close: Callable[[], None] = lambda: None  # frees data that was read ahead
    # where a step's data begins, JSON-serialisable; None if the step number alone says it
    position: Callable[[int], dict[str, Any] | None] = lambda step: None
    # ``restore_position(saved, step)`` restores what ``position`` returned; ``step`` is read next
    restore_position: Callable[[Mapping[str, Any] | None, int], None] = lambda saved, step: None
    num_tokens: int = 0  # to train on; 0 if they are streamed and so not counted
    # factor of the loss of (step, micro_step), if not all targets count: see [Note: The mean over what counts] in
    # `zeroshard.data.batches`
    loss_weight: Callable[[int, int], Tensor] | None = None
    named_evals: Mapping[str, Iterable[EvalBatch]] = field(default_factory=dict)  # further validation sets
    said: str = ""  # how examples are packed into rows, in words
    facts: Mapping[str, Any] = field(default_factory=dict)  # the same as numbers, for the log


@dataclass(frozen=True)
class Schedule:
    """How many steps to train, and when to evaluate and save. Intervals are in steps; 0: only at the end."""

    max_steps: int
    grad_accum_steps: int
    grad_clip: float
    eval_interval: int
    checkpoint_interval: int
    seed: int
    checkpoint_async: bool = True
    keep_checkpoints: int = 0  # newest checkpoints to keep; 0: all
    keep_every: int = 0  # checkpoints at multiples of this many steps are kept too; 0: none
    keep_best: bool = False
    exact_sums: bool = False  # bit-identical on any number of ranks: [Note: Reproducible] in `step`


@dataclass
class Progress:
    """How far a run is; callbacks may end it."""

    step: int = 0  # steps completed
    first_step: int = 0  # steps completed when it began; above 0 if the run is resumed
    first_token: int = 0  # tokens trained on then; earlier steps may have had another size
    status: ExitStatus = ExitStatus.OK  # why the run ends after this step; OK: it goes on, or is at its end
    at_end: bool = False  # after ``max_steps``, or because a callback asked for it

    @property
    def failed(self) -> bool:
        """Whether the run ends without a save, as the last step or its plan failed."""
        return self.status not in (ExitStatus.OK, *STOPPED)


@dataclass(frozen=True)
class Run:
    """A run, ready to be trained; one per rank. Its data are this rank's; only rank 0 has a lock."""

    strategy: Strategy
    corpus: Corpus
    learning_rate: Callable[[int], float]  # of a step, counted from 0 without skipped ones
    schedule: Schedule
    folder: Path
    device: torch.device
    tokens_per_step: int  # of all ranks together
    speed: Speed = field(default_factory=Speed)
    scaler: LossScaler | None = None  # of float16
    guard: StepGuard = field(default_factory=StepGuard)
    best: BestLoss = field(default_factory=BestLoss)
    config: dict[str, Any] | None = None  # as JSON-serialisable values, saved with each checkpoint
    comm: ObservedCommunicator | None = None  # the strategy's, if its collectives are recorded
    about: dict[str, str] = field(default_factory=dict)  # the run in words, by label: `about_run`
    kernels: Mapping[str, str] = field(default_factory=dict)  # what serves each operation, as ``LayerNorm: triton``
    link: Mapping[str, Any] = field(default_factory=dict)  # the requested and the measured speed of a slowed link
    lock: RunLock | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    contract: Contract | None = None  # the run's plan
    local_steps: OuterSteps | None = None  # if replicas take local steps
    callbacks: list[Callback] = field(default_factory=list)  # in the order in which they are told of an event
    progress: Progress = field(default_factory=Progress)
    # in the context that it makes, memory that runs out is taken care of; its argument says where that was
    out_of_memory: Callable[[Callable[[], str]], AbstractContextManager[Any]] = nullcontext

    @property
    def first_step(self) -> int:
        """Steps completed before this run began; above 0 if it is resumed."""
        return self.progress.first_step

    @property
    def together(self) -> Communicator:
        """The ranks that take each step together: all of them, or with local steps those of this rank's replica."""
        return self.strategy.comm if self.local_steps is None else self.local_steps.shard

    def tell(self, call: Callable[[Callback], bool | None]) -> None:
        """Tell each callback of an event; the run ends if one of them returns True."""
        for each in self.callbacks:
            if call(each):
                self.progress.at_end = True

    def tokens_at(self, step: int) -> int:
        """Tokens that all ranks together have trained on after ``step`` steps."""
        return self.progress.first_token + (step - self.first_step) * self.tokens_per_step

    def require_folder(self) -> None:
        """Check that the run folder still belongs to this run; rank 0 calls it before it commits a checkpoint.

        Raises:
            OSError: the folder was removed, or belongs to another run now.
        """
        if self.lock is not None:
            self.lock.require()

    def close(self) -> None:
        """Release the data, close the callbacks (the log is complete, however the run ended) and unlock the folder."""
        self.corpus.close()
        for each in self.callbacks:
            each.close()
        if self.lock is not None:
            self.lock.close()


def is_due(step: int, interval: int) -> bool:
    """Whether what comes every ``interval`` steps (0: at the end alone) comes after ``step``."""
    return interval > 0 and step % interval == 0
