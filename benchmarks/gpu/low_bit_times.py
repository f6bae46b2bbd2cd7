"""Seconds of an update with 8-bit states, beside torch's fused AdamW and, if it is installed, bitsandbytes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import rows as gpu_rows
import torch
from kernel_times import timer
from torch import nn

from zeroshard import kernels
from zeroshard.optim import AdamW8bit, FlashAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
# Bytes that must move for an element: weights, gradient, both moments, correction; scales are left out.
BYTES = {"torch fused": 28, "adamw8bit": 16, "flash-adamw": 12, "adamw8bit, many": 16, "bitsandbytes": 16}
SMALL, LARGE = 124_000_000, 774_000_000


def updates(budget: gpu_rows.Budget, say: gpu_rows.Say) -> None:
    """One tensor of two sizes, and as many elements in 148 tensors, as a GPT-2 has."""
    for numel in (5000,) if gpu_rows.TOY else (SMALL, LARGE):
        _interleaved([name for name in BYTES if name != "bitsandbytes"], numel, budget, say)


def beside_bitsandbytes(budget: gpu_rows.Budget, say: gpu_rows.Say) -> None:
    """One tensor of the small size, which bitsandbytes updates too."""
    if find_spec("bitsandbytes") is None or not gpu_rows.ON_GPU:
        say(case="bitsandbytes", left_out="it is not installed, or there is no GPU")
        return
    _interleaved(list(BYTES), SMALL, budget, say)


def _interleaved(names: list[str], numel: int, budget: gpu_rows.Budget, say: gpu_rows.Say) -> None:
    with torch.cuda.stream(gpu_rows.STREAM) if gpu_rows.STREAM else nullcontext(), kernels.use_kernels("triton"):
        timers = {}
        for name in names:
            with gpu_rows.losing_itself_alone(say, f"{name} {numel}"):
                # A capture of bitsandbytes' step fails, and torch's generator then stays in it until the process ends.
                timers[name], _ = timer([_step(name, numel)], 0.02, captures=name != "bitsandbytes")
        for index in budget.rounds(2, 9):
            for name, measure in timers.items():
                seconds = measure()
                bytes_per_s = BYTES[name] * numel / seconds
                say(case=name, numel=numel, round=index, seconds=seconds, bytes_per_s=bytes_per_s)
    del timers
    gpu_rows.cleared()


def _step(name: str, numel: int) -> Callable[[], object]:
    """The step of an optimizer that has its states."""
    dtype = torch.bfloat16 if name == "flash-adamw" else torch.float32
    count = (2 if gpu_rows.TOY else 148) if name.endswith("many") else 1
    params = [nn.Parameter(torch.randn(numel // count, device=gpu_rows.DEVICE).to(dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn(param.shape, device=gpu_rows.DEVICE).to(dtype)
    if name == "torch fused":
        optimizer = torch.optim.AdamW(params, **SETTINGS, fused=True, capturable=gpu_rows.ON_GPU)
    elif name == "bitsandbytes":
        optimizer = import_module(name).optim.AdamW8bit(params, **SETTINGS)
    else:
        optimizer = (FlashAdamW if name == "flash-adamw" else AdamW8bit)(params, **SETTINGS)
    optimizer.step()
    return optimizer.step
