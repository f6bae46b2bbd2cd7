"""What the loop is given: everything that a run is made of, as plain values.

`zeroshard.train.setup.build` makes it from a configuration; `zeroshard.train.loop.loop` has never seen one.
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
    """How often and how long; counts of steps, 0 for "only at the end"."""

    max_steps: int
    grad_accum_steps: int
    grad_clip: float
    eval_interval: int
    checkpoint_interval: int
    seed: int
    checkpoint_async: bool = True
    keep_checkpoints: int = 0  # 0: all
    keep_every: int = 0  # steps
    keep_best: bool = False
    reproducible: bool = False  # on any number of ranks


@dataclass(frozen=True)
class Run:
    """A run, ready to be trained; one per rank.

    Attributes:
        strategy: the model, its optimizer and its ranks.
        batches: this rank's training batches.
        eval_batches: this rank's validation batches, the same ones each time.
        learning_rate: of a step, counted from 0, of those that were taken.
        schedule: how often and how long.
        observers: told of everything; on rank 0 alone there are any.
        folder: the run folder; checkpoints go below it.
        device: where batches go.
        tokens_per_step: of all ranks together.
        num_flops_per_token: forward and backward, for MFU.
        num_recomputed_flops_per_token: what activation checkpointing adds, for HFU.
        peak_flops_per_s: of one device; None where it is not known.
        first_step: steps already done, above 0 when the run is resumed.
        first_token: tokens already seen, which may have come in steps of another size.
        scaler: of the loss, where float16 computes; None elsewhere.
        guard: which steps are taken.
        best: the lowest validation loss, and whether the run shall stop since it is long ago.
        config: what goes into each checkpoint, as JSON can hold it.
        comm: the strategy's communicator, observed; None where nobody counts.
        kernels: who serves each operation, as ``LayerNorm: triton``.
        link: what the ranks' link was asked to be, and was found to be; empty where none is slowed.
        stage: that ``--strategy auto`` has come to; None for another strategy.
        data_sha256: of the prepared tokens, to see that a resumed run trains on the same.
        lock: on the run folder; rank 0's alone.
        describe: writes into the folder what a run must say of itself.
        clock: of a step's parts.
        measures: what else the run measures of itself; None: nothing.
        contract: the run's plan, and whether it is kept; None where nobody plans.
        release: lets go of data that are read ahead.
        about: what the run is, in words, by label, in the order of printing; see `zeroshard.train.setup.about_run`.
        loss_weight: what the loss of (step, micro_step) is multiplied by, where not all targets count: see [Note: The
            mean over what counts] in `zeroshard.data.examples.batches`; None: nothing.
        named_evals: this rank's batches of further validation sets, by name.
        rows: how full rows of examples are and how sources are mixed, for the log; empty: rows of one plain text.
        tokens_by_source: of mixed sources, that were trained on after so many steps.
        replicas: those that take local steps; None where all ranks take each step together.
        data_position: where the data of a step begin, for its checkpoint; None where the step says it.
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
        """The ranks that take each step together: all, or those of a replica that takes local steps."""
        return self.strategy.comm if self.replicas is None else self.replicas.shard

    def tokens_at(self, step: int) -> int:
        """Tokens seen by all ranks together once ``step`` steps are done."""
        return self.first_token + (step - self.first_step) * self.tokens_per_step

    def require_folder(self) -> None:
        """Rank 0, before it gives a checkpoint its name: see that the run folder is still this run's.

        Raises:
            OSError: it was removed, or is another run's now.
        """
        if self.lock is not None:
            self.lock.require()

    def renew_folder(self) -> bool:
        """Rank 0, before it begins a checkpoint: make the run folder again if it was removed, and say whether it was.

        Raises:
            OSError: it cannot be made, or another run has taken the place.
        """
        if self.lock is None or not self.lock.renew():
            return False
        self.describe()
        return True

    def close(self) -> None:
        """Close the observers and let the folder go: the log is whole, whatever ended the run."""
        self.release()
        for observer in self.observers:
            observer.close()
        if self.lock is not None:
            self.lock.close()


def checkpoint_folder(run_folder: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run_folder / "checkpoints"
