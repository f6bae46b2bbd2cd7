"""Did a change make the step slower? Two versions of zeroshard take steps in turn, and their times are compared.

    git worktree add ../before REVISION      # with a virtual environment of its own, ../before/.venv
    python benchmarks/claims/two_versions.py ../before/.venv/bin/python --rounds 30

`zeroshard bench step` compares contestants of one version; between two runs of it a shared machine changes by more than
a version does. Here the ranks of both versions live at the same time. One version steps while the other one waits, for
each contestant after the other, so that a pair of times is a second or two apart. A pair is the quicker of two steps of
each, with the slower rank's wall time and the ranks' mean CPU time. The table has medians over all pairs, and the
median of the ratios of pairs with its standard error.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
from typing import IO, Any, cast

WORKER = "--worker"


def serve(shape_name: str, names: list[str]) -> None:
    """A rank of one version: for each line of the input, a contestant's name, take steps and print their times."""
    import torch
    import torch.distributed as dist

    from zeroshard.lab.bench import step  # the version's own
    from zeroshard.lab.bench.ranks import communicator

    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=os.environ["MEET"], rank=rank, world_size=world)
    shape, device = step.SHAPES[shape_name], torch.device("cpu")
    comms = {comm: communicator(comm) for comm in sorted({re.split("[@+]", name)[1] for name in names if "@" in name})}
    contestants = {name: step.build(name, shape, comms, device) for name in names}
    batch = step.batch(shape, rank, device)
    for contestant in contestants.values():
        for _ in range(3):
            step.once(contestant, *batch)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        times = [step.take(contestants[line.strip()], *batch) for _ in range(3)][1:]
        print(*map(min, zip(*times, strict=True)), flush=True)


def start(python: str, meet: str, shape: str, names: list[str], world: int) -> list[subprocess.Popen[str]]:
    """The ranks of one version, ready to step."""
    ranks = []
    for rank in range(world):
        env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1", "MEET": meet}
        env |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
        env |= {"THP_MEM_ALLOC_ENABLE": "1"}  # large tensors in huge pages
        words = [python, __file__, WORKER, shape, *names]
        ranks.append(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env))
    for rank in ranks:
        if (said := cast("IO[str]", rank.stdout).readline().strip()) != "ready":
            raise SystemExit(f"error: {python}: a rank ended before its first step, after {said!r}; run it to see why")
    return ranks


def step(ranks: list[subprocess.Popen[str]], name: str) -> tuple[float, float]:
    """Seconds of a step: wall time of the slower rank, and CPU time of a rank in the mean."""
    for rank in ranks:
        print(name, file=rank.stdin, flush=True)
    times = [tuple(map(float, cast("IO[str]", rank.stdout).readline().split())) for rank in ranks]
    return max(wall for wall, _ in times), statistics.fmean(cpu for _, cpu in times)


def table(found: dict[tuple[str, str], list[tuple[float, float]]], names: list[str]) -> str:
    """A row for each contestant, in wall and in CPU time."""
    from zeroshard.host.columns import columns

    rows: list[tuple[Any, ...]] = [("contestant", "time", "before ms", "now ms", "ratio", "of pairs", "error", "pairs")]
    for name in names:
        for kind, label in enumerate(("wall", "cpu")):
            before, now = ([each[kind] for each in found[name, version]] for version in ("before", "now"))
            ratios = [b / a for a, b in zip(before, now, strict=True)]
            medians = statistics.median(before), statistics.median(now)
            error = 1.25 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
            times = (f"{1e3 * each:.4g}" for each in medians)
            shown = (medians[1] / medians[0], statistics.median(ratios), error)
            rows.append((name, label, *times, *(f"{each:.3f}" for each in shown), str(len(ratios))))
    return "\n".join(columns(rows, right=tuple(range(2, 8))))


def main() -> None:
    """Start both versions, let them step in turn, and print the table."""
    if sys.argv[1:2] == [WORKER]:
        serve(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="the python of the other version's virtual environment")
    parser.add_argument("--contestants", nargs="+", default=["zero1@shm", "zero2@shm", "zero3@shm"])
    parser.add_argument("--shape", default="wide", help="of the model: wide, deep, small or tiny")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--nproc", type=int, default=2)
    given = parser.parse_args()
    pythons = {"before": given.before, "now": sys.executable}
    versions: dict[str, list[subprocess.Popen[str]]] = {}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for version, python in pythons.items():
                meet = f"file://{folder}/{version}"
                versions[version] = start(python, meet, given.shape, given.contestants, given.nproc)
            for _ in range(given.rounds):
                for name in random.sample(given.contestants, len(given.contestants)):
                    for version in random.sample(list(versions), len(versions)):
                        found.setdefault((name, version), []).append(step(versions[version], name))
        finally:
            for rank in (rank for ranks in versions.values() for rank in ranks):
                rank.kill()
                rank.wait()
    print(table(found, given.contestants))


if __name__ == "__main__":
    main()
