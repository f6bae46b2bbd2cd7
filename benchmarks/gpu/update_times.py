"""Seconds of AdamW's update with a clipping factor, and of the search for writes before it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import kernel_cases
import rows as gpu_rows
import torch
from kernel_times import timer
from torch import nn

from zeroshard import kernels


def updates(budget: gpu_rows.Budget, say: gpu_rows.Say) -> None:
    """torch's fused update with a clipping factor, and the search before it."""
    for numel in (5000,) if gpu_rows.TOY else (124_000_000, 1_558_000_000):
        with torch.no_grad(), torch.cuda.stream(gpu_rows.STREAM) if gpu_rows.STREAM else nullcontext():
            timers = {
                name: timer([function], 0.02)[0] for name, function in (_updates(numel) | _comparisons(numel)).items()
            }
            for index in budget.rounds(2, 9):
                for name, measure in timers.items():
                    seconds = measure()
                    num_bytes = (6 if "written" in name else 28) * numel
                    say(case=name, numel=numel, round=index, seconds=seconds, bytes_per_s=num_bytes / seconds)
        del timers
        gpu_rows.cleared()


def _updates(numel: int) -> dict[str, Callable[[], object]]:
    """torch's update."""
    param, grad, m = (torch.randn(numel, device=gpu_rows.DEVICE) for _ in range(3))
    v, factor = torch.rand(numel, device=gpu_rows.DEVICE), torch.full((), 0.5, device=gpu_rows.DEVICE)
    options = kernel_cases.OPTIONS
    leaf = nn.Parameter(param)
    leaf.grad = grad
    how: dict[str, Any] = {"betas": (options.beta1, options.beta2), "weight_decay": options.weight_decay}
    fused: Any = torch.optim.AdamW([leaf], options.lr, **how, fused=True, capturable=gpu_rows.ON_GPU)
    fused.state[leaf] |= {"step": torch.full((), 10.0, device=gpu_rows.DEVICE), "exp_avg": m, "exp_avg_sq": v}
    # This is how `torch.amp.GradScaler` passes a factor to a fused optimizer.
    fused.grad_scale, fused.found_inf = factor, torch.zeros((), device=gpu_rows.DEVICE)
    return {"torch fused": fused.step}


def _comparisons(numel: int) -> dict[str, Callable[[], object]]:
    """The search, before an update, for what a user wrote into bf16 weights: by our kernel, by PyTorch."""
    from zeroshard.kernels.written import carry_written
    from zeroshard.zero.buffers.changed_values import take_where_it_differs

    master = torch.randn(numel, device=gpu_rows.DEVICE)
    written = master.bfloat16()

    def theirs() -> None:
        with kernels.use_kernels("reference"):
            take_where_it_differs(master, written)

    return {"written, ours": lambda: carry_written(master, written), "written, torch": theirs}
