"""What remedies for slow links cost in loss: the same model, data and tokens under each, with several seeds.

    python benchmarks/remedy_losses.py --text tinyshakespeare.txt --out runs/remedies

10.8 M parameters, 2,000 steps of 4 sequences of 64 tokens, three seeds: some four minutes a run on 2 cores. Runs
stay in ``--out``: what is complete is not made again, and what was interrupted goes on from its last checkpoint, so the
command may be given as often as one likes. A run's loss is the validation loss at its end, with local steps that of the
weights which all replicas have in common.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from zeroshard.columns import columns

MODEL = ["--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384", "--seq-len", "64"]
ROWS = 4  # sequences of a step, all ranks together


def _wire(weights: str, grads: str) -> tuple[int, list[str]]:
    return 2, ["--strategy", "zero2", "--wire.weights", weights, "--wire.grads", grads]


def _replicas(count: int, every: int, *more: str) -> tuple[int, list[str]]:
    return count, ["--strategy", "zero1", "--shard-size", "1", "--replicas.every", str(every), *more]


# By name: how many ranks, and their flags. The first is what others are held against.
REMEDIES: dict[str, tuple[int, list[str]]] = {
    "fp32": (2, ["--strategy", "zero2"]),
    "int8": _wire("int8", "int8"),
    "int8-int4": _wire("int8", "int4"),
    "replicas2-every32": _replicas(2, 32),
    "replicas4-every32": _replicas(4, 32),
    "int4": _wire("int4", "int4"),
    "replicas2-every32-int4": _replicas(2, 32, "--replicas.wire", "int4"),
}


def trained(text: str, folder: Path, remedy: str, seed: int, steps: int) -> dict[str, Any]:
    """The losses of a run, which is made, or gone on with, if it is not complete yet."""
    out = folder / f"{remedy}-seed{seed}"
    evals = _evals(out)
    if not evals or evals[-1][0] < steps:
        num_ranks, flags = REMEDIES[remedy]
        words = ["--data", "text", "--data.path", text, "--data.dir", str(folder / "data"), "--out", str(out), *MODEL]
        words += ["--max-steps", str(steps), "--warmup-steps", str(steps // 20), "--seed", str(seed)]
        words += ["--nproc", str(num_ranks), "--global-batch-size", str(ROWS)]
        words += ["--micro-batch-size", str(ROWS // num_ranks), "--eval-interval", str(steps // 10)]
        words += ["--eval-rows", "128", "--checkpoint-interval", str(max(steps // 8, 1)), "--keep-checkpoints", "1"]
        words += ["--resume", "auto", "--comm", "shm", *flags]
        done = subprocess.run([sys.executable, "-m", "zeroshard", "train", *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stderr)
        evals = _evals(out)
    return {"remedy": remedy, "seed": seed, "val_loss": evals[-1][1], "curve": evals}


def _evals(out: Path) -> list[tuple[int, float]]:
    """Validation losses by step, those of a resumed run once."""
    log = out / "metrics.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return sorted({each["step"]: each["loss"] for each in events if each["event"] == "eval"}.items())


def table(found: list[dict[str, Any]]) -> str:
    """A row for each remedy: its mean over the seeds that the first has too, and how far it is from the first's."""
    losses = {(each["remedy"], each["seed"]): each["val_loss"] for each in found}
    first = found[0]["remedy"]
    rows = [("remedy", "seeds", "val loss", f"against {first}", "by seed")]
    for remedy in dict.fromkeys(each["remedy"] for each in found):
        seeds = [seed for name, seed in losses if name == remedy and (first, seed) in losses]
        ratios = [losses[remedy, seed] / losses[first, seed] - 1 for seed in seeds]
        mean, mean_of_first = (fmean(losses[name, seed] for seed in seeds) for name in (remedy, first))
        by_seed = " ".join(f"{ratio:+.2%}" for ratio in ratios)
        rows.append((remedy, str(len(seeds)), f"{mean:.4f}", f"{mean / mean_of_first - 1:+.2%}", by_seed))
    return "\n".join(columns(rows, right=(1, 2, 3)))


def main() -> None:
    """Make what is missing, seed by seed, and print the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="file to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--remedies", nargs="+", choices=list(REMEDIES), default=list(REMEDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        for remedy in arguments.remedies:
            found.append(trained(arguments.text, arguments.out, remedy, seed, arguments.steps))
            (arguments.out / "losses.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"seed {seed}  {remedy}  {found[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    print(table(found))


if __name__ == "__main__":
    main()
