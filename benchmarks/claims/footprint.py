"""What a rank's process really holds and really sends: peak resident memory, and bytes on the loopback interface.

    python benchmarks/claims/footprint.py
    python benchmarks/claims/footprint.py --contestants ddp fsdp zero3@ring --world 4
    MALLOC_TRIM_THRESHOLD_=67108864 python benchmarks/claims/footprint.py

Every contestant runs alone, in fresh processes. Memory is the peak of the resident set over `--steps` steps, less what
the process held before its model was made (interpreter, torch and what it loads on first use, process group). RSS
counts a page that ranks share in each of them; PSS, which splits it, stands beside it, as it is between two steps.
With malloc's own settings freed blocks of a few MiB stay in the process, whoever trains; the third command has them
leave it, so that what is resident is what is alive. Bytes are what the kernel counts on the loopback interface of a
private network namespace, so nothing else is in it, divided by (N-1) M for N ranks and M bytes of weights: 2.00 is
one reduce-scatter and one all-gather. The namespace needs root; without it that column is empty.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")  # huge pages round memory up: measured without

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zeroshard.lab.bench import step as step_benchmark
from zeroshard.lab.bench.ranks import close, communicator

IN_NAMESPACE = "--in-namespace"


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def pss_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def take(contestant: step_benchmark.Contestant, num_steps: int, *batch: torch.Tensor) -> int:
    """Bytes that ``num_steps`` steps and two barriers put on the loopback interface."""
    dist.barrier()
    before = loopback_bytes()
    for _ in range(num_steps):
        step_benchmark.take(contestant, *batch)
    dist.barrier()
    return loopback_bytes() - before


def rank_main(rank: int, name: str, args: argparse.Namespace, store: str, result: str) -> None:
    torch.set_num_threads(1)
    shape, world = step_benchmark.SHAPES[args.shape], args.world
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    dist.all_reduce(torch.ones(1))
    kind = name.partition("@")[2]
    comms = {kind: communicator(kind or "torch")}
    tokens, targets = step_benchmark.batch(shape, rank, torch.device("cpu"))
    warm = step_benchmark.build("plain", step_benchmark.SHAPES["tiny"], comms, torch.device("cpu"))
    step_benchmark.take(warm, tokens[:1, :64] % 256, targets[:1, :64] % 256)  # what torch loads on first use
    del warm
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
    base, base_pss = status_bytes("VmRSS"), pss_bytes()
    contestant = step_benchmark.build(name, shape, comms, torch.device("cpu"))
    weights = sum(p.numel() * p.element_size() for p in contestant.model.parameters())

    take(contestant, 2, tokens, targets)
    few, many = (take(contestant, num_steps, tokens, targets) for num_steps in (1, 1 + args.steps))
    peak, pss = status_bytes("VmHWM") - base, pss_bytes() - base_pss
    if rank == 0:
        wire = (many - few) / args.steps / ((world - 1) * weights)
        Path(result).write_text(json.dumps({"name": name, "rss": peak, "pss": pss, "wire": wire, "weights": weights}))
    dist.barrier()
    del contestant
    close(comms[kind])
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        spawn = (name, args, f"{folder}/store", f"{folder}/result.json")
        mp.start_processes(rank_main, args=spawn, nprocs=args.world, start_method="spawn")
        return json.loads(Path(f"{folder}/result.json").read_text())


def show(rows: list[dict[str, Any]], *, private: bool) -> None:
    base = rows[0]
    print(f"{'':12} {'peak RSS MiB':>12} {'/ ' + base['name']:>7} {'PSS MiB':>9} {'/ ' + base['name']:>7} {'wire':>6}")
    for row in rows:
        wire = f"{row['wire']:6.3f}" if private else "     -"
        print(
            f"{row['name']:12} {row['rss'] / 2**20:12.1f} {row['rss'] / base['rss']:7.3f} "
            f"{row['pss'] / 2**20:9.1f} {row['pss'] / base['pss']:7.3f} {wire}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, as processes of this machine")
    parser.add_argument("--shape", choices=step_benchmark.SHAPES, default="wide")
    parser.add_argument("--steps", type=int, default=4, help="steps that bytes are counted over")
    parser.add_argument(
        "--contestants",
        nargs="+",
        default=["ddp", *(f"zero{s}@{c}" for c in ("ring", "shm") for s in (1, 2, 3)), "zero1", "zero3"],
        help="the first is the one that the others are held against",
    )
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument(IN_NAMESPACE, action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.in_namespace and os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip"):
        command = [sys.executable, *sys.argv, IN_NAMESPACE]
        done = subprocess.run(["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command])
        sys.exit(done.returncode)
    rows = [measure(name, args) for name in args.contestants]
    print(f"{args.shape}: {step_benchmark.SHAPES[args.shape]}, {args.world} ranks, torch {torch.__version__}")
    show(rows, private=args.in_namespace)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
