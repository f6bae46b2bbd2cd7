"""What remedies for slow links cost in loss: the same model, data and tokens under each, with several seeds.

    python benchmarks/study/remedy_losses.py --text tinyshakespeare.txt --out runs/remedies --figure losses.png

10.8 M parameters, 2,000 steps of 4 sequences of 64 tokens, three seeds: some four minutes a run on 2 cores. Runs
stay in ``--out``: what is complete is not made again, and what was interrupted goes on from its last checkpoint, so the
command may be given as often as one likes. A run's loss is the validation loss at its end, with local steps that of the
weights which all replicas have in common. Replicas begin apart from step 0, or *together*: the first fifth of the steps
is the run without a remedy, which then goes on from its checkpoint with local steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from zeroshard.columns import columns
from zeroshard.lab.report import png
from zeroshard.lab.report.figure import CYCLE, MARKERS, Axis, Figure, Series

MODEL = ["--model.n-layer", "6", "--model.n-head", "6", "--model.n-embd", "384", "--seq-len", "64"]
ROWS = 4  # sequences of a step, all ranks together
TOGETHER = 0.2  # of the steps, those before the first local one, where replicas begin together


@dataclass(frozen=True)
class Remedy:
    """How many ranks, with which flags; ``together``: for its first steps replicas average gradients, as fp32's do."""

    num_ranks: int
    flags: tuple[str, ...]
    together: bool = False


def _wire(weights: str, grads: str) -> Remedy:
    return Remedy(2, ("--strategy", "zero2", "--wire.weights", weights, "--wire.grads", grads))


def _replicas(count: int, every: int, *more: str, together: bool = False) -> Remedy:
    flags = ("--strategy", "zero1", "--shard-size", "1", "--local-steps.every", str(every), *more)
    return Remedy(count, flags, together)


AVERAGED = ("--local-steps.outer-lr", "1", "--local-steps.outer-momentum", "0")
SHORT = ("--local-steps.outer-lr", "0.7", "--local-steps.outer-momentum", "0.5")
# The mean of more replicas, each with fewer rows, has less noise and is shorter: it bears more.
OF_FOUR = ("--local-steps.outer-lr", "0.7", "--local-steps.outer-momentum", "0.7")
# Others are held against the first.
REMEDIES = {
    "fp32": Remedy(2, ("--strategy", "zero2")),
    "int8": _wire("int8", "int8"),
    "int8-int4": _wire("int8", "int4"),
    "replicas2-every32": _replicas(2, 32),
    "replicas4-every32": _replicas(4, 32),
    "replicas2-every32-averaged": _replicas(2, 32, *AVERAGED),
    "replicas4-every32-averaged": _replicas(4, 32, *AVERAGED),
    "replicas2-every32-momentum": _replicas(2, 32, *SHORT),
    "replicas2-every32-together": _replicas(2, 32, *SHORT, together=True),
    "replicas4-every32-together": _replicas(4, 32, *OF_FOUR, together=True),
    "replicas4-every32-together-momentum5": _replicas(4, 32, *SHORT, together=True),
    "int4": _wire("int4", "int4"),
    "replicas2-every32-int4": _replicas(2, 32, "--local-steps.wire", "int4"),
}


def trained(text: str, folder: Path, name: str, seed: int, steps: int) -> dict[str, Any]:
    """The losses of a run, which is made, or gone on with, if it is not complete yet."""
    remedy, out = REMEDIES[name], folder / f"{name}-seed{seed}"
    parts = [(remedy, steps)]
    if remedy.together:
        parts.insert(0, (REMEDIES["fp32"], round(TOGETHER * steps)))
    for each, last in parts:
        evals = _evals(out)
        if not evals or evals[-1][0] < last:
            _train(text, folder / "data", out, each, seed, last, steps)
    return {"remedy": name, "seed": seed, "val_loss": _evals(out)[-1][1], "curve": _evals(out)}


def _train(text: str, data: Path, out: Path, remedy: Remedy, seed: int, last: int, steps: int) -> None:
    """Train to step ``last`` by the schedule of a run of ``steps``."""
    words = ["--data", "text", "--data.path", text, "--data.dir", str(data), "--out", str(out), *MODEL]
    words += ["--max-steps", str(last), "--decay-steps", str(steps), "--warmup-steps", str(steps // 20)]
    words += ["--seed", str(seed), "--nproc", str(remedy.num_ranks), "--global-batch-size", str(ROWS)]
    words += ["--micro-batch-size", str(ROWS // remedy.num_ranks), "--eval-interval", str(steps // 10)]
    words += ["--eval-rows", "128", "--checkpoint-interval", str(max(steps // 8, 1)), "--keep-checkpoints", "1"]
    words += ["--resume", "auto", "--comm", "shm", *remedy.flags]
    done = subprocess.run([sys.executable, "-m", "zeroshard", "train", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


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


def figure(found: list[dict[str, Any]]) -> Figure:
    """Validation loss by step of each remedy, the mean over its seeds."""
    series = []
    for index, remedy in enumerate(dict.fromkeys(each["remedy"] for each in found)):
        curves = [dict(each["curve"]) for each in found if each["remedy"] == remedy]
        steps = sorted(set.intersection(*map(set, curves)) - {0})
        means = tuple(fmean(curve[step] for curve in curves) for step in steps)
        name = f"{remedy}, {len(curves)} seed{'s' if len(curves) > 1 else ''}"
        colour, marker = CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]
        series.append(Series(name, "line", colour, tuple(map(float, steps)), means, marker=marker))
    title = "Validation loss under remedies of slow links, 10.8 M parameters"
    return Figure("remedy-losses", title, Axis("step"), Axis("validation loss"), tuple(series), height=1.8)


def main() -> None:
    """Make what is missing, seed by seed, and print the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="file to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--remedies", nargs="+", choices=list(REMEDIES), default=list(REMEDIES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--figure", type=Path, help="draw curves of validation losses here, a PNG")
    arguments = parser.parse_args()
    found = []
    for seed in arguments.seeds:
        for remedy in arguments.remedies:
            found.append(trained(arguments.text, arguments.out, remedy, seed, arguments.steps))
            (arguments.out / "losses.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"seed {seed}  {remedy}  {found[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    print(table(found))
    if arguments.figure is not None:
        png.draw(figure(found), arguments.figure)


if __name__ == "__main__":
    main()
