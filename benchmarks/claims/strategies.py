"""Do all strategies train alike? Every strategy with every feature, through the command line, against one process.

    python benchmarks/claims/strategies.py
    python benchmarks/claims/strategies.py --strategies zero3 fsdp2 --features plain --steps 50 --json s.json

Each cell is a run of `zeroshard train` on the demo's model and data with the same global batch. The reference is one
process with torch's own optimizer in fp32, clipping where the cell does. A cell shows the largest difference of its
training loss from the reference's, in nats, over all steps; the JSON has the loss curves. Exit status 1 where a cell
failed or its difference is above the tolerance.

The learning rate is a third of the demo's. At the demo's, and without clipping, the loss jumps at about step 9, and a
jump makes large differences of small ones: bf16 was 0.2 (DDP) to 0.35 nats (the others) from fp32.

Tolerances. In fp32 sums are taken in another order, and Adam divides by what may be small: 1e-5 leaves room for some
tens of steps. bf16 keeps 8 bits of each activation and, where weights are gathered, of each weight: 1e-2. All cells
start from the same weights, however a strategy makes them: in fp32 the first losses agree to 1e-6.

The ranks of a run are forked from a process that has imported torch, and find their world in the environment as under
torchrun; what `zeroshard` does with its words is all that they do. That saves ten seconds a cell.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from zeroshard.parallel import STRATEGIES

GLOBAL_BATCH = 16  # sequences
FIRST_LOSS_TOLERANCE = 1e-6
TIMEOUT_S = 300.0
HEADING = """# Strategies

Do all strategies of `zeroshard train` compute the same losses? Each cell of the table is a run of a strategy (its row)
with a feature (its column), on the demo's model and data. `python benchmarks/claims/strategies.py --markdown
docs/strategies.md` writes this page; its `--help` describes the runs and the tolerances.
"""
PRELOAD = [
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "zeroshard.train.loop.loop",
]


@dataclass(frozen=True)
class Feature:
    flags: tuple[str, ...] = ()
    tolerance: float = 1e-5  # nats
    same_start: bool = True  # the first loss is the reference's
    reference: tuple[str, ...] = ()  # what the one process is given


CLIP = ("--grad-clip", "0.5")
FEATURES = {
    "plain": Feature(),
    "accumulation": Feature(("--micro-batch-size", "2")),
    "clipping": Feature(CLIP, reference=CLIP),
    "checkpointing": Feature(("--model.activation-checkpointing", "full")),
    "compile": Feature(("--compile",)),
    "bf16": Feature(("--dtype", "bfloat16"), tolerance=1e-2, same_start=False),
}


@dataclass(frozen=True)
class Cell:
    strategy: str
    feature: str
    passed: bool
    difference: float | None = None  # nats; None where the run failed
    first_difference: float | None = None
    note: str = ""
    losses: list[float] = field(default_factory=list)
    wall_s: float = 0.0


def main() -> int:
    args = _arguments()
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # ranks have nothing else to do, and a forked pool would hang
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--config", str(args.config), "--data.dir", str(folder / "tokens"), "--data.max-tokens", "200000"]
        flags += ["--data", "python-stdlib", "--data.tokenizer", "bytes", "--optimizer", "adamw"]
        flags += ["--max-steps", str(args.steps), "--warmup-steps", str(args.steps // 4), "--eval-interval", "0"]
        flags += ["--eval-rows", "1", "--global-batch-size", str(GLOBAL_BATCH), "--seq-len", str(args.seq_len)]
        flags += ["--grad-clip", "0", "--lr", "1e-3", "--min-lr", "1e-4", "--compile-backend", args.compile_backend]
        wanted = dict.fromkeys(FEATURES[feature].reference for feature in args.features)
        references = {given: _reference(folder, flags, given) for given in wanted}
        cells = []
        for feature in args.features:
            for strategy in args.strategies:
                reference = references[FEATURES[feature].reference]
                cells.append(_run_cell(folder, strategy, feature, flags, args.world, reference))
                _tell(cells[-1])
    environment = {
        "steps": args.steps,
        "ranks": args.world,
        "tokens a step": GLOBAL_BATCH * args.seq_len,
        "compile": args.compile_backend,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }
    table = _as_markdown(cells, environment)
    print(table)
    if args.markdown:
        args.markdown.write_text(f"{HEADING}\n{table}\n", encoding="utf-8")
    if args.json:
        curves = {" ".join(given) or "plain": losses for given, losses in references.items()}
        body = {"environment": environment, "references": curves, "cells": [asdict(cell) for cell in cells]}
        args.json.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    return 0 if all(cell.passed for cell in cells) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--features", nargs="+", choices=FEATURES, default=list(FEATURES))
    parser.add_argument("--world", type=int, default=2, choices=[1, 2, 4, 8], help="ranks, as processes here")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--compile-backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--config", type=Path, default=Path(__file__).parents[2] / "configs" / "demo.toml")
    parser.add_argument("--json", type=Path, help="write cells and loss curves here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    return parser.parse_args()


def _reference(folder: Path, flags: list[str], given: Sequence[str]) -> list[float]:
    own = ["--strategy", "ddp", "--micro-batch-size", str(GLOBAL_BATCH), *given]
    return _losses(folder / f"reference{'-'.join(given)}", [*flags, *own], world=1)


def _run_cell(folder: Path, strategy: str, feature: str, flags: list[str], world: int, reference: list[float]) -> Cell:
    chosen, started = FEATURES[feature], time.perf_counter()
    own = ["--strategy", strategy, "--micro-batch-size", str(GLOBAL_BATCH // world), *chosen.flags]
    try:
        losses = _losses(folder / f"{strategy}-{feature}", [*flags, *own], world)
    except RuntimeError as error:
        return Cell(strategy, feature, passed=False, note=str(error))
    differences = [abs(one - other) for one, other in zip(losses, reference, strict=True)]
    starts_alike = differences[0] <= FIRST_LOSS_TOLERANCE or not chosen.same_start
    return Cell(
        strategy,
        feature,
        passed=starts_alike and max(differences) <= chosen.tolerance,
        difference=max(differences),
        first_difference=differences[0],
        losses=losses,
        wall_s=time.perf_counter() - started,
    )


def _losses(out: Path, flags: list[str], world: int) -> list[float]:
    """Train on ``world`` ranks and return the loss of each step; raises RuntimeError with a failed run's last words."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    argv, log = ["train", *flags, "--nproc", str(world), "--out", str(out)], out.with_suffix(".log")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank_main, args=(rank, world, port, argv, log)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + TIMEOUT_S
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.kill()
        rank.join()
    if any(rank.exitcode != 0 for rank in ranks):
        lines = log.read_text(encoding="utf-8").strip().splitlines() if log.exists() else []
        raise RuntimeError(f"exit status {[rank.exitcode for rank in ranks]}: {lines[-1] if lines else 'no word'}")
    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [event["loss"] for event in events if event["event"] == "step"]


def _rank_main(rank: int, world: int, port: int, argv: list[str], log: Path) -> None:
    """``zeroshard ARGV`` as one rank of a world on the loopback interface."""
    from zeroshard.cli import main as zeroshard

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.exit(zeroshard(argv))


def _tell(cell: Cell) -> None:
    what = cell.note if cell.difference is None else f"difference {cell.difference:.1e}  {cell.wall_s:.1f} s"
    mark = "ok  " if cell.passed else "FAIL"
    print(f"{mark}  {cell.feature:<14}{cell.strategy:<12}{what}", file=sys.stderr, flush=True)


def _as_markdown(cells: list[Cell], environment: dict[str, object]) -> str:
    strategies = list(dict.fromkeys(cell.strategy for cell in cells))
    features = list(dict.fromkeys(cell.feature for cell in cells))
    by_place = {(cell.strategy, cell.feature): cell for cell in cells}
    lines = [
        "A cell has the largest difference, over all steps, between its training loss and that of one process in fp32,",
        "in nats. A number in bold is above the tolerance in the last row.",
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


if __name__ == "__main__":
    sys.exit(main())
