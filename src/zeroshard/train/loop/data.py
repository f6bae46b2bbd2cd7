"""`Corpus`: a run's data, as the loop reads it; `zeroshard.train.setup.corpus` opens it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zeroshard.data import Batches
from zeroshard.data.base import EvalBatch


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
    loss_weight: Callable[[int, int], float] | None = None
    named_evals: Mapping[str, Iterable[EvalBatch]] = field(default_factory=dict)  # further validation sets
    said: str = ""  # how examples are packed into rows and sources mixed, in words
    facts: Mapping[str, Any] = field(default_factory=dict)  # the same as numbers, for the log
    # tokens of each mixed source that a number of steps train on, without padding
    tokens_by_source: Callable[[int], Mapping[str, int]] = lambda steps: {}
