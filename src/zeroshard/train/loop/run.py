"""`Run`: everything that the training loop needs, as plain values.

`zeroshard.train.setup.build` builds it from a configuration; `zeroshard.train.loop.loop.train` reads only the `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from zeroshard.comm import Communicator, ObservedCommunicator
from zeroshard.data import Batches
from zeroshard.data.base import EvalBatch
from zeroshard.optim import LossScaler
from zeroshard.parallel import Strategy
from zeroshard.profiling.clock import Clock
from zeroshard.train.loop.best_loss import BestLoss
from zeroshard.train.loop.measures import Measures
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.train.records.plan_contract import Contract
from zeroshard.train.records.records import Observer
from zeroshard.train.state.lock import RunLock
from zeroshard.zero import Replicas


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
    reproducible: bool = False  # bit-identical on any number of ranks: [Note: Reproducible] in `step`


@dataclass(frozen=True)
class Run:
    """A run, ready to be trained; one per rank.

    Attributes:
        strategy: the strategy, with the model, its optimizer and its communicator.
        batches: this rank's training batches.
        eval_batches: this rank's validation batches, the same ones each time.
        learning_rate: maps a step, counted from 0 without skipped ones, to its learning rate.
        schedule: numbers and intervals of steps.
        observers: loggers and trackers, told of every event; rank 0 alone has any.
        folder: the run folder; checkpoints go below it.
        device: the device of this rank, to which batches are copied.
        tokens_per_step: tokens in a step, of all ranks together.
        num_flops_per_token: FLOPs of forward and backward per token, for MFU.
        num_recomputed_flops_per_token: FLOPs that activation checkpointing adds per token, for HFU.
        peak_flops_per_s: peak of one device; None if it is not known.
        first_step: steps already completed; above 0 if the run is resumed.
        first_token: tokens already trained on; earlier steps may have had another size.
        scaler: loss scaler, if the run computes in float16; else None.
        guard: decides which steps are taken and which skipped.
        best: the lowest validation loss, and whether the run should stop early.
        config: the configuration as JSON-serialisable values, saved with each checkpoint.
        comm: the strategy's communicator, wrapped to record collectives; None if they are not recorded.
        kernels: the implementation that serves each operation, as ``LayerNorm: triton``.
        link: the requested and the measured speed of a slowed link; empty if none is slowed.
        stage: the stage that ``--strategy auto`` chose; None for another strategy.
        data_sha256: hash of the prepared tokens, to check that a resumed run trains on the same ones.
        lock: lock on the run folder; rank 0 alone has it.
        describe: writes ``config.toml`` and the tokenizer into the run folder.
        clock: times the parts of a step.
        measures: further measurements of the run (memory, overlap, trace); None: none.
        contract: the run's plan, compared with each step; None if there is no plan.
        release: frees data that was read ahead.
        about: a description of the run by label, in the order of printing; see `zeroshard.train.setup.about_run`.
        loss_weight: factor by which the loss of (step, micro_step) is multiplied, if not all targets count: see [Note:
            The mean over what counts] in `zeroshard.data.examples.batches`; None: no factor.
        named_evals: this rank's batches of further validation sets, by name.
        rows: how full rows of examples are and how sources are mixed, for the log; empty for rows of one plain text.
        tokens_by_source: maps a number of steps to the tokens of each mixed source that they train on.
        replicas: the replicas, if they take local steps; None if all ranks take each step together.
        data_position: maps a step to where its data begins, for a checkpoint; None if the step number alone says it.
    """

    strategy: Strategy
    batches: Batches
    eval_batches: Iterable[EvalBatch]
    learning_rate: Callable[[int], float]
    schedule: Schedule
    observers: Sequence[Observer]
    folder: Path
    device: torch.device
    tokens_per_step: int
    num_flops_per_token: int = 0
    num_recomputed_flops_per_token: int = 0
    peak_flops_per_s: float | None = None
    first_step: int = 0
    first_token: int = 0
    scaler: LossScaler | None = None
    guard: StepGuard = field(default_factory=StepGuard)
    best: BestLoss = field(default_factory=BestLoss)
    config: dict[str, Any] | None = None
    comm: ObservedCommunicator | None = None
    kernels: Mapping[str, str] = field(default_factory=dict)
    link: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    data_sha256: str = ""
    lock: RunLock | None = None
    describe: Callable[[], None] = lambda: None
    clock: Clock = field(default_factory=lambda: Clock("cpu", enabled=False))
    measures: Measures | None = None
    contract: Contract | None = None
    release: Callable[[], None] = lambda: None
    about: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, Any] = field(default_factory=dict)
    tokens_by_source: Callable[[int], Mapping[str, int]] = lambda steps: {}
    data_position: Callable[[int], dict[str, Any] | None] = lambda step: None
    loss_weight: Callable[[int, int], float] | None = None
    named_evals: Mapping[str, Iterable[EvalBatch]] = field(default_factory=dict)
    replicas: Replicas | None = None

    @property
    def together(self) -> Communicator:
        """The ranks that take each step together: all of them, or with local steps those of this rank's replica."""
        return self.strategy.comm if self.replicas is None else self.replicas.shard

    def tokens_at(self, step: int) -> int:
        """Tokens that all ranks together have trained on after ``step`` steps."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step

    def require_folder(self) -> None:
        """Check that the run folder still belongs to this run; rank 0 calls it before it commits a checkpoint.

        Raises:
            OSError: the folder was removed, or belongs to another run now.
        """
        if self.lock is not None:
            self.lock.require()

    def renew_folder(self) -> bool:
        """Recreate the run folder if it was removed; returns whether it was. Rank 0 calls it before a checkpoint.

        Raises:
            OSError: the folder cannot be created, or belongs to another run now.
        """
        if self.lock is None or not self.lock.renew():
            return False
        self.describe()
        return True

    def close(self) -> None:
        """Release the data, close the observers (the log is complete, however the run ended) and unlock the folder."""
        self.release()
        for observer in self.observers:
            observer.close()
        if self.lock is not None:
            self.lock.close()


def checkpoint_folder(run_folder: Path) -> Path:
    """The folder of a run's checkpoints, inside its run folder."""
    return run_folder / "checkpoints"
