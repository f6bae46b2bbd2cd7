"""What ranks have while a Hugging Face folder becomes a base in four bits, and while they train adapters on it.

    python benchmarks/claims/loaded_base.py [--base nf4] [--nproc 1 2] [--only hf init-from]

A model of 197 million parameters with random weights is saved by transformers, in bfloat16, and a run begins with it:
as a model of transformers (``--model hf:FOLDER``), and as ours (``--init-from FOLDER``). Resident memory is that of
`small_memory`: pages of the process's own and its part of shared ones, read every few milliseconds, less what a run of
the same depth and a tiny width has beyond its plan. *loading* is the most before the first step, *steps* the most until
the last one has ended, and *plan* the peak that the run's plan predicts. Ranks never have the model in 16 bits if both
stay near the plan, which has codes of the blocks, and two blocks of it at a time in 16 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from small_memory import MALLOC, MIB, TINY, Process, watch
from transformers import LlamaConfig, LlamaForCausalLM

from zeroshard.host.columns import columns

VOCAB = 8192
WIDTH, LAYERS = 1024, 14


def saved(folder: Path, width: int) -> Path:
    """A model of transformers with random weights in ``folder``."""
    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": LAYERS}
    heads: dict[str, Any] = {"num_attention_heads": width // 64, "num_key_value_heads": width // 64}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, max_position_embeddings=512, **sizes, **heads)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def train(given: argparse.Namespace, model: Path, out: Path, how: str, num_ranks: int) -> dict[str, Any]:
    """Train adapters over the model: bytes of the rank that had the most, and of the plan."""
    words = [str(Path(sys.executable).with_name("zeroshard")), "train", "--data", "synthetic", "--lora", "16"]
    words += ["--model", f"hf:{model}"] if how == "hf" else ["--init-from", str(model)]
    words += ["--base", given.base] if given.base != "none" else []
    words += ["--strategy", "zero3", "--nproc", str(num_ranks), "--comm", "shm", "--dtype", given.dtype]
    words += ["--seq-len", str(given.seq_len), "--micro-batch-size", "1", "--model.activation-checkpointing", "full"]
    words += ["--max-steps", "2", "--warmup-steps", "1", "--log-interval", "1", "--out", str(out)]
    words += ["--eval-interval", "0", "--eval-rows", "1", "--checkpoint-interval", "0"]
    log = out.with_suffix(".log")
    with log.open("w") as file:
        env = os.environ | MALLOC | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, text=True, env=env)
        seen = watch(process, out)
    if process.returncode:
        raise SystemExit(log.read_text())
    plan = json.loads((out / "summary.json").read_text())["plan"]
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [each for each in events if each["event"] == "step"]
    ends = [datetime.fromisoformat(each["time"]).timestamp() for each in steps]
    begin = ends[0] - steps[0]["step_s"]
    ranks = sorted(seen.values(), key=lambda each: max(each.resident, default=0))[-num_ranks:]
    return {
        "planned": plan["peak_bytes"]["predicted"] + (plan["comm_bytes"]["predicted"] if num_ranks > 1 else 0),
        "kept": sum(each["predicted"] for each in plan["memory_bytes"].values()),
        "loading": max(rank.most("resident", begin) for rank in ranks),
        "steps": max(_most_between(rank, begin, ends[-1]) for rank in ranks),
    }


def _most_between(rank: Process, begin: float, end: float) -> int:
    return max(n for at, n in zip(rank.times, rank.resident, strict=True) if begin < at <= end)


def main() -> None:
    """Run all of it, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="nf4", choices=["nf4", "int8", "int4", "e4m3", "none"])
    parser.add_argument("--nproc", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", default=["hf", "init-from"])
    parser.add_argument("--dtype", default="float32", choices=["bfloat16", "float32"])
    parser.add_argument("--seq-len", type=int, default=64)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="loaded-base-"))
    rows = [["begins with", "ranks", "loading MiB", "steps MiB", "plan MiB", "loading / plan", "steps / plan"]]
    try:
        tiny, large = saved(folder / "tiny-model", TINY), saved(folder / "model", WIDTH)
        size = sum(path.stat().st_size for path in large.glob("*.safetensors"))
        for how in given.only:
            for num_ranks in given.nproc:
                without = train(given, tiny, folder / f"tiny-{how}-{num_ranks}", how, num_ranks)
                found = train(given, large, folder / f"{how}-{num_ranks}", how, num_ranks)
                own = without["steps"] - without["planned"]
                loading, steps = found["loading"] - own, found["steps"] - own
                sizes = [f"{each / MIB:.1f}" for each in (loading, steps, found["planned"])]
                of_it = [f"{each / found['planned']:.3f}" for each in (loading, steps)]
                rows.append([how, str(num_ranks), *sizes, *of_it])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"a folder of {size / MIB:.1f} MiB in bfloat16, base {given.base}, {given.dtype}")
    print("\n".join(columns(rows, right=tuple(range(1, 7)))))


if __name__ == "__main__":
    main()
