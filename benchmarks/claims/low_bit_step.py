"""The optimizer's step on a CPU: AdamW with states in fewer bits beside torch's fused one, and what is the bottleneck.

    python benchmarks/claims/low_bit_step.py                    # one tensor, then the shapes of GPT-2 124M
    python benchmarks/claims/low_bit_step.py --threads 1 --rounds 21

Contestants take turns, and each line has the median over the rounds. GB/s: the bytes that a step must move, over its
time. They are the bottleneck where a plain copy of the same machine, measured in the same rounds, is as fast; where
contestants that move fewer bytes take as long as others, arithmetic is.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.kernels import use_kernels
from zeroshard.kernels.state_codes import SCALES
from zeroshard.optim import AdamW8bit, FlashAdamW
from zeroshard.zero.state_formats.formats import FORMATS
from zeroshard.zero.state_formats.operands import FormattedStates

Shapes = list[tuple[int, ...]]
ONE: Shapes = [(1 << 24,)]
WIDTH = 768
BLOCK: Shapes = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,), (4 * WIDTH, WIDTH), (4 * WIDTH,)]
BLOCK += [(WIDTH, 4 * WIDTH), (WIDTH,), *[(WIDTH,)] * 4]
GPT2: Shapes = [(50304, WIDTH), (1024, WIDTH), *BLOCK * 12, (WIDTH,), (WIDTH,)]
NEAR = 0.8  # of a copy's rate: then memory is the bottleneck


def optimizer_of(who: str, shapes: Shapes) -> tuple[Callable[[], object], int]:
    """Return a step of a contestant over new parameters of these shapes, and the bytes that it moves an element."""
    dtype = torch.bfloat16 if who.startswith("FlashAdamW") else torch.float32
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    settings: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if who == "AdamW fused":
        return torch.optim.AdamW(params, fused=True, **settings).step, 28
    if who.startswith("AdamW in "):
        return in_format(params, who.removeprefix("AdamW in "), settings)
    cls = FlashAdamW if who.startswith("FlashAdamW") else AdamW8bit
    optimizer = cls(params, **settings)
    # weights, gradient, two codes, and the correction: all but the gradient are read and written
    num_bytes = 2 * 2 + 2 + 2 * 3 if cls is FlashAdamW else 2 * 4 + 4 + 2 * 2
    if not who.endswith("reference"):
        return optimizer.step, num_bytes

    def step() -> None:
        with use_kernels("reference"):
            optimizer.step()

    return step, num_bytes


def in_format(params: list[nn.Parameter], name: str, settings: dict[str, Any]) -> tuple[Callable[[], object], int]:
    """Return torch's fused AdamW with states in a format, which steps as on a unit of a model."""
    form = FORMATS[name]
    assert form is not None
    optimizer = torch.optim.AdamW(params, fused=True, **settings)
    states = FormattedStates(optimizer, form, lambda _: ("weight", 0))
    (group,) = optimizer.param_groups

    def step() -> None:
        for (part,) in states.parts([params]):
            group["params"] = part
            states.bring(part)
            optimizer.step()
            states.take_back()
        group["params"] = params

    # Weights and gradient, 12, and of both states what is kept is read and written; wide values stay in a cache
    return step, 12 + 2 * 2 * sum(dtype.itemsize for suffix, dtype in form.kept.items() if suffix != SCALES)


def copy_of(numel: int) -> tuple[Callable[[], Tensor], int]:
    """Return a copy of as many fp32 elements, and the bytes that it moves an element."""
    source, target = torch.randn(2, numel)
    return lambda: target.copy_(source), 8


def main() -> None:
    """Measure, and print a table for each list of shapes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of an operation")
    parser.add_argument("--rounds", type=int, default=11, help="steps of each contestant")
    parser.add_argument("--reference", action="store_true", help="the references in PyTorch take part: slow")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    who = ["AdamW fused", "AdamW8bit", "FlashAdamW", "AdamW in bf16", "AdamW in int8"]
    who += ["AdamW8bit reference", "FlashAdamW reference"] if options.reference else []
    for title, shapes in (("one tensor", ONE), ("GPT-2 124M", GPT2)):
        numel = sum(torch.Size(shape).numel() for shape in shapes)
        contestants = {name: optimizer_of(name, shapes) for name in who} | {"copy": copy_of(numel)}
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for step, _ in contestants.values():
            step()  # states come to be
        for _ in range(options.rounds):
            for name, (step, _) in contestants.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(taken) for name, taken in seconds.items()}
        rates = {name: contestants[name][1] * numel / median / 1e9 for name, median in medians.items()}
        print(f"{title}: {len(shapes)} tensors, {numel:,} elements, {options.threads} threads, {options.rounds} rounds")
        print(f"  {'':22}{'ns/element':>11}{'bytes/element':>15}{'GB/s':>8}{'of fused':>10}  bottleneck")
        for name, median in medians.items():
            ratio = median / medians["AdamW fused"]
            binds = "memory" if rates[name] >= NEAR * rates["copy"] else "arithmetic"
            figures = f"{median / numel * 1e9:11.2f}{contestants[name][1]:15d}{rates[name]:8.1f}{ratio:10.2f}"
            print(f"  {name:22}{figures}  {binds}", flush=True)


if __name__ == "__main__":
    main()
