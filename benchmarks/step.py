"""Time of one training step: our stages beside a plain loop and torch's DDP, in one interleaved run.

    python benchmarks/step.py --world 2 --shape wide
    python benchmarks/step.py --contestants ddp zero1 zero1@ring zero1@shm zero3@ring zero3@shm

Every contestant trains its own copy of the same model on the same data in the same processes. A round visits all of
them in a shuffled order and takes a few steps with each, so that a machine whose speed drifts is equally unkind to
all; ratios are taken round by round against the first contestant. No gradient clipping, the same fused AdamW on
every side, large tensors in huge pages for all, as the trainer has them. ``plain`` communicates nothing: the floor
under DDP. Medians and quartiles; wall time, and CPU time of the process with its communication threads.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch reads it once

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from zeroshard.comm import Communicator, LocalCommunicator, TorchCommunicator
from zeroshard.comm.ring import RingCommunicator
from zeroshard.comm.shm import SharedMemoryCommunicator
from zeroshard.models import build_model
from zeroshard.zero import Zero


@dataclass(frozen=True)
class Shape:
    n_embd: int
    n_layer: int
    n_head: int
    vocab_size: int
    seq_len: int
    batch: int


SHAPES = {
    "wide": Shape(512, 8, 8, 8192, 128, 1),  # 29.5 M parameters, few tokens: heavy in communication
    "deep": Shape(384, 6, 6, 4096, 128, 4),  # 12.3 M parameters, more tokens: heavy in computation
    "tiny": Shape(64, 2, 2, 256, 64, 1),  # 0.12 M parameters: pure overhead
}


@dataclass
class Contestant:
    model: nn.Module
    forward: Callable[..., torch.Tensor]
    optimizer: torch.optim.Optimizer


COMMUNICATORS = {"torch": TorchCommunicator, "ring": RingCommunicator, "shm": SharedMemoryCommunicator}


def build(name: str, shape: Shape, comms: dict[str, Communicator], device: torch.device) -> Contestant:
    sizes = {"n_embd": shape.n_embd, "n_layer": shape.n_layer, "n_head": shape.n_head}
    model = build_model("gpt2-demo", vocab_size=shape.vocab_size, seq_len=shape.seq_len, overrides=sizes).to(device)
    if name.startswith("zero"):
        name, comm = name[: len("zero0")], comms[name[len("zero0@") :]]
        zero = Zero(model, stage=int(name[-1]), units=model.blocks, comm=comm)
        return Contestant(model, model, zero.optimizer(torch.optim.AdamW, lr=1e-4, fused=True))
    wrapped: nn.Module = model
    if name == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contestant(model, wrapped, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))


def step(contestant: Contestant, tokens: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    """Seconds of wall and of CPU time."""
    if dist.is_initialized():
        dist.barrier()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    contestant.forward(tokens, targets).backward()
    contestant.optimizer.step()
    contestant.optimizer.zero_grad()
    if tokens.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def rank_main(rank: int, args: argparse.Namespace, store: str, result: str) -> None:
    torch.set_num_threads(args.threads)
    world, shape = args.world, SHAPES[args.shape]
    device = torch.device("cuda", rank % torch.cuda.device_count()) if args.device == "cuda" else torch.device("cpu")
    if world > 1:
        dist.init_process_group(args.backend, init_method=f"file://{store}", rank=rank, world_size=world)
    kinds = sorted({name.partition("@")[2] for name in args.contestants})
    comms = {kind: COMMUNICATORS[kind or args.comm]() if world > 1 else LocalCommunicator() for kind in kinds}
    contestants = {name: build(name, shape, comms, device) for name in args.contestants}
    generator = torch.Generator().manual_seed(rank)
    tokens, targets = (
        torch.randint(0, shape.vocab_size, (shape.batch, shape.seq_len), generator=generator).to(device)
        for _ in range(2)
    )
    rounds: list[dict[str, tuple[float, float]]] = []
    order = random.Random(0)  # the same on every rank
    for _ in range(args.rounds + 1):
        names = list(contestants)
        order.shuffle(names)
        seen = {}
        for name in names:
            times = [step(contestants[name], tokens, targets) for _ in range(args.steps + 1)][1:]
            seen[name] = tuple(statistics.median(column) for column in zip(*times, strict=True))
        rounds.append(seen)
        gc.freeze()  # as the trainer does: what lives from here on is not searched for garbage again and again
    if rank == 0:
        Path(result).write_text(json.dumps(rounds[1:]))  # the first round warms up
    if world > 1:
        del contestants, comms
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def quartiles(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarise(rounds: list[dict[str, tuple[float, float]]], names: list[str]) -> list[dict[str, object]]:
    base = names[0]
    rows = []
    for name in names:
        wall = quartiles([r[name][0] for r in rounds])
        ratio = quartiles([r[name][0] / r[base][0] for r in rounds])
        cpu = quartiles([r[name][1] for r in rounds])
        cpu_ratio = quartiles([r[name][1] / r[base][1] for r in rounds])
        rows.append({"name": name, "wall_s": wall, "ratio": ratio, "cpu_s": cpu, "cpu_ratio": cpu_ratio})
    return rows


def show(rows: list[dict[str, object]], base: str) -> None:
    print(f"{'':10} {'wall ms':>9} {'quartiles':>17} {'/ ' + base:>9} {'quartiles':>13} {'cpu ms':>9} {'/ ' + base:>9}")
    for row in rows:
        wall, ratio, cpu, cpu_ratio = row["wall_s"], row["ratio"], row["cpu_s"], row["cpu_ratio"]
        print(
            f"{row['name']:10} {wall[1] * 1e3:9.1f} {wall[0] * 1e3:8.1f}-{wall[2] * 1e3:<8.1f} {ratio[1]:9.3f} "
            f"{ratio[0]:6.3f}-{ratio[2]:<6.3f} {cpu[1] * 1e3:9.1f} {cpu_ratio[1]:9.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2, help="ranks, as processes of this machine")
    parser.add_argument("--shape", choices=SHAPES, default="wide")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--steps", type=int, default=3, help="timed steps of each contestant a round, after one untimed"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads a rank")
    parser.add_argument("--backend", default="gloo", choices=["gloo", "nccl"])
    parser.add_argument("--comm", default="torch", choices=COMMUNICATORS, help="what our stages communicate with")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument(
        "--contestants",
        nargs="+",
        help="the first is the one that the others are held against; zero2@shm: ours over that communicator",
    )
    parser.add_argument("--json", type=Path, help="write rounds and summary here")
    args = parser.parse_args()
    args.contestants = args.contestants or ["plain" if args.world == 1 else "ddp", *(f"zero{s}" for s in range(4))]
    with tempfile.TemporaryDirectory() as folder:
        result = f"{folder}/result.json"
        spawn = (args, f"{folder}/store", result)
        if args.world == 1:
            rank_main(0, *spawn)
        else:
            mp.start_processes(rank_main, args=spawn, nprocs=args.world, start_method="spawn")
        rounds = json.loads(Path(result).read_text())
    rows = summarise(rounds, args.contestants)
    shape = SHAPES[args.shape]
    environment = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "world": args.world,
        "backend": args.backend if args.world > 1 else "none",
        "comm": args.comm if args.world > 1 else "none",
        "rounds": args.rounds,
    }
    print(f"{args.shape}: {shape}\n{environment}")
    show(rows, args.contestants[0])
    if args.json:
        args.json.write_text(
            json.dumps(
                {"environment": environment, "shape": asdict(shape), "summary": rows, "rounds": rounds}, indent=1
            )
        )


if __name__ == "__main__":
    main()
