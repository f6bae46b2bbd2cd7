"""Bytes of activations at the peak of a micro-batch by each way to recompute: the table of how-to/long-context.md.

    python benchmarks/claims/long_context.py --layers 8 32 --seq-len 8192

Tensors have no values, so any length is counted in seconds; sizes and lifetimes are those of a run on a CPU. Counted is
all but weights, their gradients and inputs on the host, per token and width C, in numbers of the compute dtype.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.columns import columns
from zeroshard.lab.predict.recorder import StorageEvents
from zeroshard.models import LlamaConfig

WAYS = [("none", "none"), ("full", "none"), ("offload", "none"), ("full", "auto"), ("offload", "auto")]


def peak_bytes(config: LlamaConfig, seq_len: int) -> int:
    """Return the most bytes of activations that forward and backward of one sequence have at once."""
    sizes, most = [0], [0]

    def changed(_storage: int, change: int) -> None:
        sizes[0] += change
        most[0] = max(most[0], sizes[0])

    def freed(param: Tensor) -> None:
        param.grad = None

    with FakeTensorMode():
        model = config.build()
        tokens = torch.zeros(1, seq_len, dtype=torch.int64)
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(freed)
        recorder = StorageEvents(changed, lambda *_: None)
        recorder.ignore([*model.parameters(), tokens])
        with recorder:
            model(tokens, tokens).backward()
    return most[0]


def main() -> None:
    """Print one row for each depth and way."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--width", type=int, default=512)
    given = parser.parse_args()
    rows: list[list[Any]] = [["blocks", "recomputed", "tiles", "numbers a token, in C", "of full"]]
    for depth in given.layers:
        sizes = {"n_head": given.width // 64, "n_kv_head": given.width // 64, "n_embd": given.width}
        config = LlamaConfig(vocab_size=256, seq_len=given.seq_len, n_layer=depth, **sizes)
        found = {
            way: peak_bytes(replace(config, activation_checkpointing=way[0], tiles=way[1]), given.seq_len)
            for way in WAYS
        }
        for (how, tiles), most in found.items():
            numbers = most / given.seq_len / given.width / 4
            rows.append([depth, how, tiles, f"{numbers:.1f}", f"{most / found['full', 'none']:.2f}"])
    print("\n".join(columns([[str(cell) for cell in row] for row in rows], right=(0, 3, 4))))


if __name__ == "__main__":
    main()
