"""What a choice costs in loss: the same model, data and tokens under each, with several seeds.

    python benchmarks/study/losses.py remedies --text tinyshakespeare.txt --out runs/remedies --figure losses.png
    python benchmarks/study/losses.py states   --text tinyshakespeare.txt --out runs/states
    python benchmarks/study/losses.py states   --text tinyshakespeare.txt --out runs/base --base FOLDER --only 'tuned*'
    python benchmarks/study/losses.py products --text tinyshakespeare.txt --out runs/products --steps 200
    python benchmarks/study/losses.py bases    --text tinyshakespeare.txt --out runs/bases --steps 500 --width 128
    python benchmarks/study/losses.py states   --text tinyshakespeare.txt --out runs/gpu --rows 16 --jobs 10

*products*: the blocks' products in 8 bits. *remedies*: what makes runs faster on slow links.
*states*: optimizer states of fewer bytes, in training and in
fine-tuning: of a model that was trained before on the interpreter's standard library, or of one in Hugging Face's
format in a folder, SmolLM2-135M say. *bases*: adapters over such a model, kept in fewer bits.

10.8 M parameters, 2,000 steps of 4 sequences of 64 tokens, three seeds: some four to ten minutes a run on 2 cores, and
one on a GPU, where a run waits for Python and several run beside each other (``--jobs``). Runs
stay in ``--out``: what is complete is not made again, and what was interrupted goes on from its last checkpoint, so the
command may be given as often as one likes. A run's loss is the validation loss at its end, with local steps that of the
weights which all replicas have in common. Replicas begin apart from step 0, or *together*: the first fifth of the steps
is the run of the first row, which then goes on from its checkpoint with local steps.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from zeroshard.host.columns import columns
from zeroshard.lab.report import png
from zeroshard.lab.report.figure import CYCLE, MARKERS, Axis, Figure, Series

MODEL = ["--model.n-layer", "6"]
_one_at_a_time = threading.Lock()
TOGETHER = 0.2  # of the steps, those before the first local one, where replicas begin together


@dataclass(frozen=True)
class Choice:
    """A row of the table.

    Attributes:
        num_ranks, flags: of its run.
        together: its first steps are those of the first row.
        tuned: it begins with the weights of a model that was trained on another text, and makes this share of steps;
            0: it begins with drawn weights and makes all.

    One rank on a CPU trains under `wide_products`, which changes nothing in fp32.
    """

    num_ranks: int
    flags: tuple[str, ...]
    together: bool = False
    tuned: float = 0.0


def _wire(weights: str, grads: str) -> Choice:
    return Choice(2, ("--strategy", "zero2", "--wire.weights", weights, "--wire.grads", grads))


def _replicas(count: int, every: int, *more: str, together: bool = False) -> Choice:
    flags = ("--strategy", "zero1", "--shard-size", "1", "--local-steps.every", str(every), *more)
    return Choice(count, flags, together)


AVERAGED = ("--local-steps.outer-lr", "1", "--local-steps.outer-momentum", "0")
SHORT = ("--local-steps.outer-lr", "0.7", "--local-steps.outer-momentum", "0.5")
# The mean of more replicas, each with fewer rows, has less noise and is shorter: it bears more.
OF_FOUR = ("--local-steps.outer-lr", "0.7", "--local-steps.outer-momentum", "0.7")
REMEDIES = {
    "fp32": Choice(2, ("--strategy", "zero2")),
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


def _tuned(*flags: str, lr: str = "1e-4", share: float = 0.25) -> Choice:
    return Choice(1, (*flags, "--lr", lr), tuned=share)


_LOW_BIT = ("adamw", "adamw8bit", "flash-adamw")
STATES = {
    **{name: Choice(1, ("--optimizer", name)) for name in _LOW_BIT},
    **{f"tuned-{name}": _tuned("--optimizer", name) for name in _LOW_BIT},
    **{f"lora-{name}": _tuned("--optimizer", name, "--lora", "8", lr="1e-3") for name in _LOW_BIT[:2]},
}
PRODUCTS = {
    "bfloat16": Choice(1, ("--dtype", "bfloat16")),
    "fp8": Choice(1, ("--dtype", "bfloat16", "--matmul", "fp8")),
}
_BASES = {"none": (), "int8": ("int8",), "nf4": ("nf4",), "nf4-double": ("nf4", "--base.double"), "int4": ("int4",)}
BASES = {
    f"{dtype}-{name}": _tuned("--dtype", dtype, "--lora", "8", *(("--base", *base) if base else ()), lr="1e-3", share=1)
    for dtype in ("float32", "bfloat16")
    for name, base in _BASES.items()
}
STUDIES = {"remedies": REMEDIES, "states": STATES, "products": PRODUCTS, "bases": BASES}


def first_of(choices: dict[str, Choice], name: str) -> str:
    """The row that a row is held against: the first of its own prefix before a hyphen, if it is tuned."""
    if not choices[name].tuned:
        return next(iter(choices))
    return next(each for each in choices if each.split("-")[0] == name.split("-")[0])


def trained(
    choices: dict[str, Choice], text: str, folder: Path, name: str, seed: int, steps: int, rows: int, base: str
) -> dict[str, Any]:
    """The losses of a run, which is made, or gone on with, if it is not complete yet."""
    choice, out = choices[name], folder / f"{name}-seed{seed}"
    on_text = ["--data", "text", "--data.path", text, "--data.dir", str(folder / "data")]
    parts = [(choice, steps)]
    if choice.together:
        parts.insert(0, (choices[first_of(choices, name)], round(TOGETHER * steps)))
    if choice.tuned and base:
        on_text += ["--model", f"hf:{base}"]
    elif choice.tuned:
        on_text += ["--init-from", str(pretrained(folder, steps, rows))]
    if choice.tuned:
        parts = [(choice, round(choice.tuned * steps))]
    if not (choice.tuned and base):
        on_text += MODEL
    for each, last in parts:
        _train(on_text, out, each, seed, last, last if choice.tuned else steps, rows)
    return {"choice": name, "seed": seed, "val_loss": _evals(out)[-1][1], "curve": _evals(out)}


def pretrained(folder: Path, steps: int, rows: int) -> Path:
    """The run from which fine-tuning begins, which is made, or gone on with, if it is not complete yet."""
    before = folder / "pretrained"
    with _one_at_a_time:
        library = [*MODEL, "--data", "python-stdlib", "--data.dir", str(folder / "library")]
        _train(library, before, Choice(1, ()), 0, steps, steps, rows)
    return before


def _train(data: list[str], out: Path, choice: Choice, seed: int, last: int, steps: int, rows: int) -> None:
    """Train to step ``last`` by the schedule of a run of ``steps``, unless that has been done."""
    evals = _evals(out)
    if evals and evals[-1][0] >= last:
        return
    words = [*data, "--out", str(out), "--seq-len", "64"]
    words += ["--max-steps", str(last), "--decay-steps", str(steps), "--warmup-steps", str(steps // 20)]
    words += ["--nproc", str(choice.num_ranks)] if choice.num_ranks > 1 else []
    words += ["--seed", str(seed), "--global-batch-size", str(rows)]
    words += ["--micro-batch-size", str(rows // choice.num_ranks), "--eval-interval", str(steps // 5)]
    words += ["--eval-rows", "128", "--checkpoint-interval", str(max(steps // 8, 1)), "--keep-checkpoints", "1"]
    words += ["--resume", "auto", "--comm", "shm", *choice.flags]
    as_ever = choice.num_ranks > 1 or torch.cuda.is_available() or "float32" in choice.flags
    program = ["-m", "zeroshard"] if as_ever else [str(Path(__file__).with_name("wide_products.py"))]
    done = subprocess.run([sys.executable, *program, "train", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def _evals(out: Path) -> list[tuple[int, float]]:
    """Validation losses by step, those of a resumed run once."""
    log = out / "metrics.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return sorted({each["step"]: each["loss"] for each in events if each["event"] == "eval"}.items())


def table(choices: dict[str, Choice], found: list[dict[str, Any]]) -> str:
    """A row for each choice: its mean over the seeds that the first has too, and how far it is from the first's."""
    losses = {(each["choice"], each["seed"]): each["val_loss"] for each in found}
    rows = [("choice", "seeds", "val loss", "against", "", "by seed")]
    for name in dict.fromkeys(each["choice"] for each in found):
        first = first_of(choices, name)
        seeds = [seed for each, seed in losses if each == name and (first, seed) in losses]
        if not seeds:
            continue
        ratios = [losses[name, seed] / losses[first, seed] - 1 for seed in seeds]
        mean, mean_of_first = (fmean(losses[each, seed] for seed in seeds) for each in (name, first))
        by_seed = " ".join(f"{ratio:+.2%}" for ratio in ratios)
        rows.append((name, str(len(seeds)), f"{mean:.4f}", first, f"{mean / mean_of_first - 1:+.2%}", by_seed))
    return "\n".join(columns(rows, right=(1, 2, 4)))


def figure(study: str, found: list[dict[str, Any]]) -> Figure:
    """Validation loss by step of each choice, the mean over its seeds."""
    series = []
    for index, choice in enumerate(dict.fromkeys(each["choice"] for each in found)):
        curves = [dict(each["curve"]) for each in found if each["choice"] == choice]
        steps = sorted(set.intersection(*map(set, curves)) - {0})
        means = tuple(fmean(curve[step] for curve in curves) for step in steps)
        name = f"{choice}, {len(curves)} seed{'s' if len(curves) > 1 else ''}"
        colour, marker = CYCLE[index % len(CYCLE)], MARKERS[index % len(MARKERS)]
        series.append(Series(name, "line", colour, tuple(map(float, steps)), means, marker=marker))
    titles = {"remedies": "under remedies of slow links", "states": "with optimizer states of fewer bytes"}
    titles["bases"] = "of adapters over a base in fewer bits"
    title = f"Validation loss {titles[study]}"
    return Figure(f"{study}-losses", title, Axis("step"), Axis("validation loss"), tuple(series), height=1.8)


def main() -> None:
    """Make what is missing, seed by seed, and print the table after each run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=list(STUDIES))
    parser.add_argument("--text", required=True, help="file to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these rows, or lora*; all, if not given")
    parser.add_argument("--base", default="", metavar="FOLDER", help="fine-tune this model of transformers")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--width", type=int, default=384, help="of the model, a multiple of 64")
    parser.add_argument("--rows", type=int, default=4, help="sequences of 64 bytes of a step, all ranks together")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time (1)")
    parser.add_argument("--figure", type=Path, help="draw curves of validation losses here, a PNG")
    arguments = parser.parse_args()
    choices = STUDIES[arguments.study]
    MODEL.extend(["--model.n-head", str(arguments.width // 64), "--model.n-embd", str(arguments.width)])
    asked = arguments.only or ["*"]
    if unknown := [name for name in asked if not fnmatch.filter(choices, name)]:
        parser.error(f"--only: {unknown[0]!r} is no row; rows: {', '.join(choices)}")
    names = [name for pattern in asked for name in fnmatch.filter(choices, pattern)]
    how = (arguments.steps, arguments.rows, arguments.base)
    wanted = [(name, seed) for seed in arguments.seeds for name in names]
    found = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        if arguments.jobs > 1:  # what others wait for comes first, what waits last
            wanted.sort(key=lambda each: choices[each[0]].tuned > 0)
            if any(choices[name].tuned for name in names) and not arguments.base:
                pool.submit(pretrained, arguments.out, *how[:2])
        runs = [pool.submit(trained, choices, arguments.text, arguments.out, *each, *how) for each in wanted]
        for (name, seed), run in zip(wanted, runs, strict=True):
            found.append(run.result())
            (arguments.out / "losses.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(f"seed {seed}  {name}  {found[-1]['val_loss']:.4f}", file=sys.stderr, flush=True)
    print(table(choices, found))
    if arguments.figure is not None:
        png.draw(figure(arguments.study, found), arguments.figure)


if __name__ == "__main__":
    main()
