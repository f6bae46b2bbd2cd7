"""What the pieces of `benchmarks/gpu_day.py` stand on: a device, a model, batches, and a step of a plain loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.lab.bench.ranks import synchronise
from zeroshard.models import LanguageModel, build_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
TOY = {} if ON_GPU else {"n_layer": 2, "n_embd": 16, "n_head": 2}
VOCAB, SEQ_LEN = (50304, 1024) if ON_GPU else (97, 8)
MAIN_MODEL = "gpt2-124m" if ON_GPU else "gpt2-demo"
Result = dict[str, Any]


class SkippedError(Exception):
    """This machine cannot run the piece, and why."""


@dataclass(frozen=True)
class Piece:
    """One process's work.

    Attributes:
        about: in a few words.
        minutes: that it may take on a GPU.
        run: measures; takes the folder that files beside the JSON may go to.
        options: what ``run`` is told beside it.
    """

    about: str
    minutes: float
    function: Callable[..., Result]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, out: Path) -> Result:
        """Measure."""
        return self.function(out, **self.options)


def seconds_in_rounds(
    functions: Mapping[str, Callable[[], object]], num_rounds: int, num_calls: int
) -> dict[str, list[float]]:
    """Seconds of a call of each function, by round: ``num_calls`` of each in a shuffled order, after one to warm up."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    order = random.Random(0)
    for _ in range(num_rounds + 1):
        for name in order.sample(list(functions), len(functions)):
            synchronise(DEVICE)
            began = time.perf_counter()
            for _ in range(num_calls):
                functions[name]()
            synchronise(DEVICE)
            times[name].append((time.perf_counter() - began) / num_calls)
    return {name: seen[1:] for name, seen in times.items()}


def model_of(name: str = MAIN_MODEL) -> LanguageModel:
    torch.manual_seed(0)
    with DEVICE:
        return build_model(name, vocab_size=VOCAB, seq_len=SEQ_LEN, overrides=TOY)


def batch_of(rows: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (rows, SEQ_LEN), generator=generator).to(DEVICE) for _ in range(2)]


def autocast_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, rows: int, *, cache_enabled: bool = True
) -> Callable[[], Tensor]:
    """A function that takes a training step under autocast and returns its loss; a graph wants no cache of casts."""
    tokens, targets = batch_of(rows)

    def step() -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16, cache_enabled=cache_enabled):
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: int) -> Callable[[], None]:
    """A function that takes a training step in the dtype that the weights have."""
    tokens, targets = batch_of(rows)

    def step() -> None:
        model(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
