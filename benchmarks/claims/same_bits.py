"""Do two versions of zeroshard train to the same bits? A line a configuration: sha256 of its weights and losses.

    python benchmarks/claims/same_bits.py > before.txt
    (change the code)
    python benchmarks/claims/same_bits.py | diff before.txt -

Five small runs on two ranks, between them every stage, both models, three communicators, accumulation, recomputation,
bf16, an average of the weights and a text of one's own. Weights are the whole ones of the last checkpoint, with the
states of the optimizer; losses and gradient norms come from ``metrics.jsonl``. What depends on the machine (times,
memory) is left out; lines of two machines may differ.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import zeroshard
from zeroshard import checkpoint

COMMON = """--nproc 2 --device cpu --max-steps 12 --warmup-steps 3 --eval-interval 6 --eval-rows 4 --seq-len 64
    --micro-batch-size 2 --model.n-layer 3 --model.n-embd 32 --seed 7"""
RUNS = {
    "gpt2 zero0 torch": "--model gpt2-demo --model.n-head 2 --strategy zero0 --comm torch",
    "gpt2 zero1 ring": "--model gpt2-demo --model.n-head 2 --strategy zero1 --comm ring --ema-decay 0.9",
    "llama zero2 shm": """--model llama-tiny --model.n-head 2 --model.n-kv-head 1 --strategy zero2 --comm shm
        --global-batch-size 12""",
    "llama zero3 ring bf16": """--model llama-tiny --model.n-head 2 --model.n-kv-head 1 --strategy zero3 --comm ring
        --dtype bfloat16 --model.activation-checkpointing selective""",
    "gpt2 ddp": "--model gpt2-demo --model.n-head 2 --strategy ddp --grad-clip 0.5",
}
LOGGED = ("event", "step", "loss", "grad_norm", "lr", "tokens")


def digest_of_weights(folder: Path) -> str:
    """sha256 over all saved tensors, by name and kind."""
    newest = checkpoint.latest(folder / "checkpoints")
    if newest is None:
        raise RuntimeError(f"{folder} has no checkpoint")
    digest = hashlib.sha256()
    with checkpoint.CheckpointReader(*checkpoint.open_manifest(newest)) as reader:
        for name in sorted(reader.names()):
            for kind, shape in sorted(reader.kinds(name).items()):
                whole = reader.read(name, kind, (0, torch.Size(shape).numel()))
                digest.update(f"{name} {kind} {shape}".encode())
                digest.update(whole.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digest_of_log(folder: Path) -> str:
    """sha256 over the numbers of steps and evaluations."""
    digest = hashlib.sha256()
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        event: dict[str, Any] = json.loads(line)
        if event["event"] in ("step", "eval"):
            digest.update(json.dumps([event.get(key) for key in LOGGED]).encode())
    return digest.hexdigest()


def main() -> int:
    """Train all, print a line each."""
    print(f"zeroshard {zeroshard.__version__}, torch {torch.__version__}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        text = Path(scratch) / "text.txt"
        text.write_text(
            "".join(f"line {number}: {number * number % 97} and {number**3 % 89}\n" for number in range(4000))
        )
        for name, flags in RUNS.items():
            out = Path(scratch) / name.replace(" ", "-")
            words = [*COMMON.split(), *flags.split(), "--data", "text", "--data.path", str(text)]
            command = [
                sys.executable,
                "-m",
                "zeroshard",
                "train",
                *words,
                "--data.dir",
                f"{scratch}/data",
                "--out",
                str(out),
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            print(f"{name:24} weights {digest_of_weights(out)}  losses {digest_of_log(out)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
