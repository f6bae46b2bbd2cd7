"""By how much do losses differ between numbers of ranks, whose sums of gradients have another order? Step by step.

    python benchmarks/claims/summation_order.py
    python benchmarks/claims/summation_order.py --steps 300 --only AdamW AdamW8bit

A small GPT-2 learns from the same rows of text (the interpreter's standard library), whose gradients are summed as 1,
2, 4 or 8 ranks sum them without ``reproducible``: by micro-batches of one rank, which rounds as many partial sums. The
spread at a step is the largest difference between two of the four runs, relative to the loss; each figure is its mean
over ten steps. A column is a choice of optimizer and of dtype. The last two columns have what else differs between runs
of fp32 AdamW: the dtype that computes, and the seed of the initial weights.

Rounding to codes has thresholds. Where a gradient differs by d, a moment in codes of spacing s moves by s with the
probability d / s: by d on average, as in fp32, but by sqrt(d s) in the root mean square. No rule of rounding avoids
that.
"""

from __future__ import annotations

import argparse
import sysconfig
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zeroshard.comm import LocalCommunicator
from zeroshard.host.columns import columns
from zeroshard.models import LanguageModel, build_model
from zeroshard.optim import AdamW8bit, FlashAdamW
from zeroshard.zero import MixedPrecision, Zero

SUMS = (1, 2, 4, 8)  # ranks, whose partial sums are those of as many micro-batches
SEQ_LEN, ROWS = 32, 8
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32}
BF16, FP32 = torch.bfloat16, torch.float32
AdamW = torch.optim.AdamW
CHOICES: dict[str, tuple[Any, torch.dtype, torch.dtype]] = {  # class, dtype of weights, dtype that computes
    "AdamW": (AdamW, FP32, FP32),
    "AdamW8bit": (AdamW8bit, FP32, FP32),
    "AdamW-bf16": (AdamW, FP32, BF16),
    "AdamW8bit-bf16": (AdamW8bit, FP32, BF16),
    "FlashAdamW": (FlashAdamW, BF16, BF16),
}
AT = (10, 20, 50, 100, 150, 200, 300, 400, 500, 750, 1000, 1500, 2000)


def text() -> Tensor:
    """Bytes of source files, int64."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def losses(model: LanguageModel, rows: Tensor, choice: str, num_sums: int, lr: float) -> Tensor:
    """The loss of each step, float64; ``rows``: int64 ``[steps, ROWS, SEQ_LEN + 1]``."""
    cls, weights, computes = CHOICES[choice]
    own, found = deepcopy(model).to(weights), []
    precision = MixedPrecision(param_dtype=computes) if computes is not weights else None
    zero = Zero(own, 0, [*own.blocks], LocalCommunicator(), precision)
    optimizer = zero.optimizer(cls, lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    for step, batch in enumerate(rows):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        total = 0.0
        for number in range(num_sums):
            mine = batch[number::num_sums]
            with zero.micro_batch(last=number == num_sums - 1):
                loss = own(mine[:, :-1], mine[:, 1:]) / num_sums
                loss.backward()
            total += loss.item()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


def spread(runs: list[Tensor]) -> Tensor:
    """The largest difference between two runs, relative to the loss, by step."""
    each = torch.stack(runs)  # [runs, steps]
    return (each.amax(0) - each.amin(0)) / each.mean(0)


def table(found: dict[str, list[Tensor]], steps: int) -> str:
    """A row for each of the steps `AT`: the mean over seeds, and over the ten steps that end there."""
    means = {name: torch.stack(each).mean(0) for name, each in found.items()}
    rows = [(str(at), *(f"{each[at - 10 : at].mean():.1e}" for each in means.values())) for at in AT if at <= steps]
    return "\n".join(columns([("step", *means), *rows], right=range(len(means) + 1)))


def main() -> None:
    """Train all, print a table after each choice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seeds", type=int, default=1, help="of weights and rows; figures are means over them")
    parser.add_argument("--only", nargs="*", default=list(CHOICES), choices=list(CHOICES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    source, found = text(), dict[str, list[Tensor]]()
    for seed in range(options.seeds):
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(source) - SEQ_LEN, (options.steps, ROWS), generator=generator)
        rows = source[starts[..., None] + torch.arange(SEQ_LEN + 1)]
        models = [build_model("gpt2-demo", seq_len=SEQ_LEN, overrides=SHAPE, seed=each) for each in (seed, 100 + seed)]
        alone: dict[str, Tensor] = {}
        for choice in options.only:
            runs = [losses(models[0], rows, choice, num_sums, options.lr) for num_sums in SUMS]
            found.setdefault(choice, []).append(spread(runs))
            alone[choice] = runs[0]
            print(f"\nseed {seed}, {choice}: loss of the last 50 steps {runs[0][-50:].mean():.4f}")
            print(table(found, options.steps), flush=True)
        if "AdamW" in alone:
            other = losses(models[1], rows, "AdamW", 1, options.lr)
            found.setdefault("(seeds)", []).append(spread([alone["AdamW"], other]))
        if {"AdamW", "AdamW-bf16"} <= alone.keys():
            found.setdefault("(dtypes)", []).append(spread([alone["AdamW"], alone["AdamW-bf16"]]))
    print(f"\n{table(found, options.steps)}")


if __name__ == "__main__":
    main()
