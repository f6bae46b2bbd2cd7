"""Time of our collectives beside gloo's, a memory copy and raw TCP, in one interleaved run.

    python benchmarks/collectives.py --worlds 2 4

Every rank is a process of this machine with one compute thread. A round visits all contestants in a shuffled order;
a call is timed on every rank from a common barrier, and takes as long as its slowest rank. Ratios to gloo's collective
of the same name are taken round by round. algbw and busbw as nccl-tests define them: bytes of the whole tensor over
time, and that times 2(W-1)/W for an all-reduce, (W-1)/W for the other two. ``copy`` copies the whole tensor once;
``tcp`` sends (W-1)/W of it to the right neighbour and receives as much from the left, over plain sockets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from zeroshard.comm.ring import RingCommunicator
from zeroshard.comm.shm import SharedMemoryCommunicator

SIZES = {"64KiB": 64 << 10, "1MiB": 1 << 20, "16MiB": 16 << 20, "64MiB": 64 << 20}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPS = ("reduce_scatter", "all_gather", "all_reduce")
SMALL_BYTES = 1 << 20  # up to here a round takes the median of several calls

gloo_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
gloo_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Tcp:
    """Plain sockets around the ring."""

    def __init__(self, rank: int, world: int, folder: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            Path(f"{folder}/port-{world}-{rank}").write_text(str(server.getsockname()[1]))
            dist.barrier()
            port = int(Path(f"{folder}/port-{world}-{(rank + 1) % world}").read_text())
            self.right = socket.create_connection(("127.0.0.1", port))
            self.left = server.accept()[0]

    def exchange(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        sender = threading.Thread(target=self.right.sendall, args=(memoryview(send.numpy()),))
        sender.start()
        view = memoryview(receive.numpy())
        while view:
            view = view[self.left.recv_into(view) :]
        sender.join()


def contestants(
    ours: dict[str, Any], tcp: Tcp, world: int, num_bytes: int, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    numel = num_bytes // dtype.itemsize // world * world
    whole, shard = torch.ones(numel, dtype=dtype), torch.ones(numel // world, dtype=dtype)
    message = torch.ones(num_bytes * (world - 1) // world, dtype=torch.uint8)
    landing = torch.empty_like(message)
    copied = torch.empty_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "gloo reduce_scatter": lambda: gloo_reduce_scatter(shard, whole),
        "gloo all_gather": lambda: gloo_all_gather(whole, shard),
        "gloo all_reduce": lambda: dist.all_reduce(whole),
        "copy": lambda: copied.copy_(whole),
        "tcp": lambda: tcp.exchange(message, landing),
    }
    for name, comm in ours.items():
        calls[f"{name} reduce_scatter"] = lambda comm=comm: comm.reduce_scatter(shard, whole).wait()
        calls[f"{name} all_gather"] = lambda comm=comm: comm.all_gather(whole, shard).wait()
        calls[f"{name} all_reduce"] = lambda comm=comm: comm.all_reduce(whole).wait()
    for call in calls.values():
        call()  # warm
    whole.fill_(0)  # sums of zeros neither overflow nor turn into slow denormals
    shard.fill_(0)
    return calls


def measure(rank: int, world: int, args: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store{world}", rank=rank, world_size=world)
    ours = {"ring": RingCommunicator(), "shm": SharedMemoryCommunicator()}
    tcp = Tcp(rank, world, folder)
    order = random.Random(0)  # the same on every rank
    results = []
    for size in args.sizes:
        for dtype in args.dtypes:
            calls = contestants(ours, tcp, world, SIZES[size], DTYPES[dtype])
            num_calls = 7 if SIZES[size] <= SMALL_BYTES else 1
            rounds: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(args.rounds):
                names = list(calls)
                order.shuffle(names)
                for name in names:
                    times = []
                    for _ in range(num_calls):
                        dist.barrier()
                        start = time.perf_counter()
                        calls[name]()
                        times.append(time.perf_counter() - start)
                    slowest = torch.tensor(times)
                    dist.all_reduce(slowest, dist.ReduceOp.MAX)
                    rounds[name].append(slowest.median().item())
            results.append({"world": world, "size": size, "dtype": dtype, "rounds_s": rounds})
    if rank == 0:
        Path(f"{folder}/result{world}").write_text(json.dumps(results))
    for comm in ours.values():
        comm.close()
    del ours, calls
    gc.collect()
    dist.destroy_process_group()
    gc.collect()


def summarise(result: dict[str, Any]) -> list[dict[str, Any]]:
    world, num_bytes, rounds = result["world"], SIZES[result["size"]], result["rounds_s"]
    rows = []
    for name, times in sorted(rounds.items(), key=lambda item: ([*OPS, ""].index(item[0].partition(" ")[2]), item[0])):
        op = name.partition(" ")[2]
        factor = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}.get(op, 0) * (world - 1) / world
        if name == "tcp":
            factor = (world - 1) / world
        time_s = statistics.median(times)
        gloo = rounds.get(f"gloo {op}")
        row = {key: result[key] for key in ("world", "size", "dtype")} | {
            "name": name,
            "time_s": time_s,
            "algbw_bytes_per_s": num_bytes / time_s,
            "busbw_bytes_per_s": num_bytes / time_s * factor if factor else None,
            "speedup_over_gloo": statistics.median(g / t for g, t in zip(gloo, times, strict=True)) if gloo else None,
        }
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    head = rows[0]
    print(f"\nworld {head['world']}, {head['size']} {head['dtype']}")
    print(f"{'':20} {'median ms':>10} {'algbw GB/s':>11} {'busbw GB/s':>11} {'x gloo':>7}")
    for row in rows:
        busbw, speedup = row["busbw_bytes_per_s"], row["speedup_over_gloo"]
        print(
            f"{row['name']:20} {row['time_s'] * 1e3:10.3f} {row['algbw_bytes_per_s'] / 1e9:11.3f} "
            f"{f'{busbw / 1e9:.3f}' if busbw else '':>11} {f'{speedup:.2f}' if speedup else '':>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks, as processes of this machine")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of the whole tensor")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write rounds and summary here")
    args = parser.parse_args()
    environment = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "cpus": os.cpu_count(),
        "rounds": args.rounds,
    }
    print(environment)
    results, summary = [], []
    for world in args.worlds:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(measure, args=(world, args, folder), nprocs=world, start_method="spawn")
            results += json.loads(Path(f"{folder}/result{world}").read_text())
        for result in results[len(summary) :]:
            summary.append(summarise(result))
            show(summary[-1])
    if args.json:
        rows = [row for rows in summary for row in rows]
        args.json.write_text(json.dumps({"environment": environment, "summary": rows, "rounds": results}, indent=1))


if __name__ == "__main__":
    main()
