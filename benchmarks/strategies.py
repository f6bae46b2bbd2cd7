"""Do all strategies train alike? Every strategy with every feature, through the command line, against one process.

    python benchmarks/strategies.py
    python benchmarks/strategies.py --strategies zero3 fsdp2 --features plain bf16 --steps 50 --json strategies.json

Each cell is a run of `zeroshard train` on the demo's model and data with the same global batch; the reference is one
process with torch's own optimizer in fp32, with clipping where the cell has it. A cell shows the largest difference of
the training loss from the reference, in nats, over all steps. Exit status 1 where one is above its tolerance.

Tolerances. In fp32 sums are taken in another order, and Adam divides by what may be small: 1e-4 leaves room for
some tens of steps. bf16 keeps 8 bits of each activation: 2e-2. All cells start from the same weights, whatever makes
them: the first loss of each fp32 cell agrees to 1e-5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from zeroshard.parallel import STRATEGIES

GLOBAL_BATCH = 16  # sequences
FIRST_LOSS_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Feature:
    flags: tuple[str, ...]
    tolerance: float = 1e-4  # nats
    reference: tuple[str, ...] = ()  # what the one process is given


CLIP = ("--grad-clip", "0.5")
FEATURES = {
    "plain": Feature(()),
    "accumulation": Feature(("--micro-batch-size", "2")),
    "clipping": Feature(CLIP, reference=CLIP),
    "checkpointing": Feature(("--model.activation-checkpointing", "selective")),
    "compile": Feature(("--compile",)),
    "bf16": Feature(("--dtype", "bfloat16"), tolerance=2e-2),
}


@dataclass(frozen=True)
class Cell:
    strategy: str
    feature: str
    difference: float | None  # nats; None where the run failed
    first_difference: float | None
    passed: bool
    note: str
    wall_s: float


def losses(folder: Path, name: str, flags: list[str]) -> tuple[list[float], float]:
    """Train and return the loss of each step, and the seconds that it took."""
    out = folder / "runs" / name
    command = [sys.executable, "-m", "zeroshard", "train", *flags, "--out", str(out)]
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"rc {done.returncode}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [e["loss"] for e in events if e["event"] == "step"], time.perf_counter() - started


def run_cell(folder: Path, strategy: str, feature: str, flags: list[str], world: int, reference: list[float]) -> Cell:
    chosen = FEATURES[feature]
    given = ["--strategy", strategy, "--nproc", str(world), "--micro-batch-size", str(GLOBAL_BATCH // world)]
    try:
        found, wall_s = losses(folder, f"{strategy}-{feature}", [*flags, *given, *chosen.flags])
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Cell(strategy, feature, None, None, False, str(error), 0.0)
    differences = [abs(one - other) for one, other in zip(found, reference, strict=True)]
    passed = max(differences) <= chosen.tolerance
    if feature != "bf16":
        passed = passed and differences[0] <= FIRST_LOSS_TOLERANCE
    return Cell(strategy, feature, max(differences), differences[0], passed, "", wall_s)


def as_markdown(cells: list[Cell], environment: dict[str, object]) -> str:
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    features = list(dict.fromkeys(cell.feature for cell in cells))
    by_place = {(cell.strategy, cell.feature): cell for cell in cells}
    lines = [
        "Largest difference of the training loss from one process, in nats.",
        "",
        f"| strategy | {' | '.join(features)} |",
        f"|---|{'---|' * len(features)}",
    ]
    for strategy in strategies:
        shown = []
        for feature in features:
            cell = by_place[strategy, feature]
            text = f"failed: {cell.note}" if cell.difference is None else f"{cell.difference:.1e}"
            shown.append(text if cell.passed else f"**{text}**")
        lines.append(f"| `{strategy}` | {' | '.join(shown)} |")
    lines.append(f"| tolerance | {' | '.join(f'{FEATURES[feature].tolerance:.0e}' for feature in features)} |")
    lines += ["", ", ".join(f"{name} {value}" for name, value in environment.items())]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument(
        "--world", type=int, default=2, choices=[1, 2, 4, 8], help="ranks, as processes of this machine"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile-backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "demo.toml")
    parser.add_argument("--json", type=Path, help="write cells and loss curves here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--config", str(args.config), "--data.dir", str(folder / "tokens"), "--grad-clip", "0"]
        flags += ["--max-steps", str(args.steps), "--warmup-steps", str(args.steps // 4), "--eval-interval", "0"]
        flags += ["--eval-batches", "1", "--global-batch-size", str(GLOBAL_BATCH)]
        flags += ["--compile-backend", args.compile_backend]
        references = {
            given: losses(
                folder,
                f"reference-{index}",
                [*flags, "--strategy", "ddp", "--nproc", "1", "--micro-batch-size", str(GLOBAL_BATCH), *given],
            )[0]
            for index, given in enumerate({FEATURES[feature].reference for feature in args.features})
        }
        cells = []
        for feature in args.features:
            for strategy in args.strategies:
                reference = references[FEATURES[feature].reference]
                cells.append(run_cell(folder, strategy, feature, flags, args.world, reference))
                print(cells[-1], file=sys.stderr, flush=True)
    environment = {
        "steps": args.steps,
        "ranks": args.world,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    table = as_markdown(cells, environment)
    print(table)
    if args.markdown:
        args.markdown.write_text(table + "\n", encoding="utf-8")
    if args.json:
        body = {"environment": environment, "cells": [asdict(cell) for cell in cells]}
        args.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0 if all(cell.passed for cell in cells) else 1


if __name__ == "__main__":
    sys.exit(main())
