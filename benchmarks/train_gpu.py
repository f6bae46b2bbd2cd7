"""Training GPT-2 on one GPU: tokens a second and MFU with and without our kernels, with and without torch.compile.

    python benchmarks/train_gpu.py --models gpt2-124m gpt2-1.5b --json train.json
    python benchmarks/train_gpu.py                                    # without a GPU: a toy model, no claims

Contestants, each in bf16 with fp32 masters, AdamW and clipping at 1.0, on the same batches from the same weights:

    eager     our engine, PyTorch's operations           compile   the same, each block compiled
    kernels   our engine, our kernels                    both      the same, each block compiled
    fp8       as both, products of blocks in 8 bits by torchao; where torchao and the device have them
    whole     no engine: torch.compile of the whole model under autocast, torch's fused AdamW

They are built one after the other, for memory's sake, and timed over whole steps; the losses of all are compared step
by step, so that what is fast has also learned. MFU counts 6 N + 12 L d T FLOPs a token (PaLM, appendix B) against the
device's dense bf16 rate as published, and against that of one large product measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are imported

from zeroshard.comm import LocalCommunicator  # noqa: E402
from zeroshard.errors import UserError  # noqa: E402
from zeroshard.models import LanguageModel, build_model  # noqa: E402
from zeroshard.models.float8 import require_float8, use_float8  # noqa: E402
from zeroshard.optim import FusedAdamW, decay_groups  # noqa: E402
from zeroshard.profiling.flops import peak_bf16_flops_per_s  # noqa: E402
from zeroshard.zero import MixedPrecision, Zero  # noqa: E402

DEVICE = torch.device("cuda" if ON_GPU else "cpu")
CONTESTANTS = ("eager", "compile", "kernels", "both", "fp8", "whole")
MAX_NORM = 1.0
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95)}
TOY = {"n_layer": 1, "n_embd": 16, "n_head": 2}


@dataclass
class Result:
    model: str
    contestant: str
    batch: int
    tokens_per_s: float
    mfu_published: float | None
    mfu_measured: float | None
    peak_bytes: int | None
    step_s: list[float]
    losses: list[float]


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def engine_step(model: LanguageModel, kernels: str, compiled: bool) -> Callable[[Tensor, Tensor], Tensor]:
    if compiled:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    zero = Zero(model, stage=0, comm=LocalCommunicator(), precision=MixedPrecision(param_dtype=torch.bfloat16))
    groups = decay_groups(model.named_parameters(), 0.1)
    if kernels == "triton":
        optimizer = zero.optimizer(FusedAdamW, groups, **ADAMW, kernels=kernels)
    else:
        optimizer = zero.optimizer(torch.optim.AdamW, groups, **ADAMW, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = model(tokens, targets)
        loss.backward()
        zero.clip_grad_norm_(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole_step(model: LanguageModel) -> Callable[[Tensor, Tensor], Tensor]:
    forward = torch.compile(model) if ON_GPU else model
    optimizer = torch.optim.AdamW(decay_groups(model.named_parameters(), 0.1), **ADAMW, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def batches(num_steps: int, batch: int, seq_len: int, vocab: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens of falling frequency, each followed by a function of itself half of the time: something to learn."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(num_steps):
        drawn = (torch.rand(batch, seq_len + 1, generator=generator) ** 4 * vocab).long().clamp(max=vocab - 1)
        follows = torch.rand(batch, seq_len, generator=generator) < 0.5
        drawn[:, 1:] = torch.where(follows, (drawn[:, :-1] * 7 + 1) % vocab, drawn[:, 1:])
        made.append((drawn[:, :-1].contiguous().to(DEVICE), drawn[:, 1:].contiguous().to(DEVICE)))
    return made


def matrix_flops_per_s(size: int = 8192) -> float | None:
    if not ON_GPU:
        return None
    a, b = (torch.randn(size, size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(20):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(a, b)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return 2 * size**3 / statistics.median(times[5:])


def run(name: str, contestant: str, args: argparse.Namespace, matrix_rate: float | None) -> Result:
    torch.compiler.reset()
    torch.manual_seed(0)
    with torch.device(DEVICE):
        kernels = "triton" if contestant in ("kernels", "both", "fp8") else "reference"
        overrides = {} if ON_GPU else TOY
        model = build_model(name, vocab_size=args.vocab_size, overrides=overrides, kernels=kernels)
    if contestant == "fp8":
        use_float8(model, emulate=not ON_GPU)
    data = batches(args.warmup + args.steps, args.batch, args.seq_len, args.vocab_size)
    if contestant == "whole":
        step = whole_step(model)
    else:
        step = engine_step(model, kernels, contestant in ("compile", "both", "fp8") and ON_GPU)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    losses, times = [], []
    for index, (tokens, targets) in enumerate(data):
        synchronize()
        start = time.perf_counter()
        losses.append(step(tokens, targets))
        synchronize()
        if index >= args.warmup:
            times.append(time.perf_counter() - start)
    tokens_per_s = args.batch * args.seq_len / statistics.median(times)
    flops_per_s = tokens_per_s * model.num_flops_per_token(args.seq_len)
    published = peak_bf16_flops_per_s(torch.cuda.get_device_name()) if ON_GPU else None
    return Result(
        model=name,
        contestant=contestant,
        batch=args.batch,
        tokens_per_s=tokens_per_s,
        mfu_published=flops_per_s / published if published else None,
        mfu_measured=flops_per_s / matrix_rate if matrix_rate else None,
        peak_bytes=torch.cuda.max_memory_allocated() if ON_GPU else None,
        step_s=times,
        losses=[loss.item() for loss in losses],
    )


def contestants_here() -> list[str]:
    """All but fp8 where torchao or the device has no products in 8 bits."""
    try:
        require_float8(DEVICE)
    except UserError:
        return [name for name in CONTESTANTS if name != "fp8"]
    return list(CONTESTANTS)


def show(result: Result, first: Result) -> None:
    shares = [f"{x:7.1%}" if x is not None else "      -" for x in (result.mfu_published, result.mfu_measured)]
    peak = f"{result.peak_bytes / 2**30:6.1f}GiB" if result.peak_bytes else "        -"
    apart = max(abs(a / b - 1) for a, b in zip(result.losses, first.losses, strict=True))
    print(
        f"{result.model:12} {result.contestant:8} {result.tokens_per_s:12,.0f} tok/s  mfu {' '.join(shares)}  {peak}"
        f"  x {result.tokens_per_s / first.tokens_per_s:5.2f}  loss {result.losses[-1]:.4f}, at most {apart:.2%} apart",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2-124m" if ON_GPU else "gpt2-demo"])
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=contestants_here())
    parser.add_argument("--batch", type=int, default=16 if ON_GPU else 1, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=1024 if ON_GPU else 8)
    parser.add_argument("--vocab-size", type=int, default=50304 if ON_GPU else 97, help="GPT-2's, rounded up to 64")
    parser.add_argument("--steps", type=int, default=30 if ON_GPU else 2, help="timed steps")
    parser.add_argument("--warmup", type=int, default=10 if ON_GPU else 1, help="steps before them")
    parser.add_argument("--json", type=Path, help="write every step here")
    args = parser.parse_args()
    matrix_rate = matrix_flops_per_s()
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu, Triton's interpreter: a toy model, no claims",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "matrix_flops_per_s": matrix_rate,
        "seq_len": args.seq_len,
        "vocab_size": args.vocab_size,
    }
    print(facts)
    results: list[Result] = []
    for name in args.models:
        first: Result | None = None
        for contestant in args.contestants:
            result = run(name, contestant, args, matrix_rate)
            first = first or result
            results.append(result)
            show(result, first)
            gc.collect()
            if ON_GPU:
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"environment": facts, "results": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
