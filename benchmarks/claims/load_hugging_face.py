"""Host memory of a rank that loads a Hugging Face model at stage 3: what it keeps, and the most that it held.

    python benchmarks/claims/load_hugging_face.py FOLDER --ranks 2 4

Each rank is a process of its own without peers, so the numbers are of one rank of so many; resident memory is read
from the kernel before the weights are loaded and at its highest point since. FOLDER may be missing: a LLaMA of
SmolLM2-135M's shape, with random weights in bfloat16, is then made there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from zeroshard.process import prepare_torch

prepare_torch()  # as the trainer does

import torch  # noqa: E402

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        load(args.folder, args.ranks[0], args.rank)
        return
    if not (args.folder / "config.json").is_file():
        make(args.folder)
    print("ranks  rank  shard MiB  unit MiB  held at most MiB  of shard + unit")
    for world_size in args.ranks:
        for rank in (0, world_size - 1):
            words = [sys.executable, __file__, str(args.folder), "--ranks", str(world_size), "--rank", str(rank)]
            subprocess.run(words, check=True)


def make(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes: dict[str, Any] = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    }
    config = LlamaConfig(vocab_size=49152, num_key_value_heads=3, tie_word_embeddings=True, **sizes)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def load(folder: Path, world_size: int, rank: int) -> None:
    from zeroshard.comm import NullCommunicator
    from zeroshard.models import InitialValues, build_model
    from zeroshard.zero import Zero

    Zero(torch.nn.Linear(2, 2), 3, comm=NullCommunicator(world_size, rank))  # imports what it needs
    with torch.device("meta"):
        model = build_model(f"hf:{folder}")
    model.check_initial_values()
    units = [sum(p.numel() for p in unit.parameters()) for unit in model.units]
    rest = sum(p.numel() for p in model.parameters()) - sum(units)
    unit_bytes = 4 * max(*units, rest)
    Path("/proc/self/clear_refs").write_text("5")  # the highest point begins here
    before = resident("VmRSS")
    zero = Zero(model, 3, units=model.units, comm=NullCommunicator(world_size, rank), init=InitialValues(model))
    held = resident("VmHWM") - before
    shard_bytes = sum(zero.memory_bytes().values())
    share, sizes = held / (shard_bytes + unit_bytes), [each / MIB for each in (shard_bytes, unit_bytes, held)]
    print(f"{world_size:5}  {rank:4}  {sizes[0]:9.1f}  {sizes[1]:8.1f}  {sizes[2]:16.1f}  {share:15.2f}")


def resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
