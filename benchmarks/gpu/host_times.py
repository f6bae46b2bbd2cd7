"""Microseconds that the host takes to issue an operation on small tensors."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import rows as gpu_rows
import torch

from zeroshard import kernels


def microseconds_of_the_host(budget: gpu_rows.Budget, say: gpu_rows.Say) -> None:
    """Microseconds of the host for an operation on small tensors, forward and backward, and in which functions."""
    (rows, width), count = ((4, 16), 3) if gpu_rows.TOY else ((64, 768), 1000)
    x, other = (torch.randn(rows, width, device=gpu_rows.DEVICE).bfloat16().requires_grad_() for _ in range(2))
    weight, bias = (torch.ones(width, device=gpu_rows.DEVICE).bfloat16().requires_grad_() for _ in range(2))
    heads = torch.randn(1, 4, rows, width // 4, device=gpu_rows.DEVICE).bfloat16().requires_grad_()
    angles = torch.ones(rows, width // 8, device=gpu_rows.DEVICE)
    arguments = {"layer_norm": [x, weight, bias], "rms_norm": [x, weight], "swiglu": [x, other],
                 "rope": [heads, heads, angles, angles]}  # fmt: skip
    for name, tensors in arguments.items():
        for who, backend in (("ours", "triton"), ("eager", "reference")):
            forward = partial(getattr(kernels, name), *tensors, kernels=backend)
            outputs = forward() if name == "rope" else (forward(),)
            wanted, upstream = [t for t in tensors if t.requires_grad], [torch.ones_like(y) for y in outputs]
            calls: dict[str, Callable[[], object]] = {
                "forward": forward,
                "backward": partial(torch.autograd.grad, outputs, wanted, upstream, retain_graph=True),
            }
            for mode, call in calls.items():
                say(case=name, mode=mode, contestant=who, us=1e6 * min(_host_s(call, count) for _ in range(3)))
                if who == "ours" and name == "layer_norm":
                    say(case=f"{name}, functions", mode=mode, us_by_function=_profiled(call, count))


def _host_s(call: Callable[[], object], count: int) -> float:
    gpu_rows.synchronise()
    began = time.perf_counter()
    for _ in range(count):
        call()
    seconds = time.perf_counter() - began
    gpu_rows.synchronise()
    return seconds / count


def _profiled(call: Callable[[], object], count: int) -> dict[str, float]:
    """The 20 functions with the most time of their own under Python's profiler, in microseconds of a call."""
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees the thread that calls alone
        profiler.runcall(_host_s, call, count)
    own: list[tuple[float, str]] = []
    for entry in profiler.getstats():
        code = entry.code
        name = code if isinstance(code, str) else f"{Path(code.co_filename).name}:{code.co_name}"
        own.append((1e6 * entry.inlinetime / count, f"{name} x {entry.callcount / count:.1f}"))
    return {name: round(us, 2) for us, name in sorted(own, reverse=True)[:20]}
