"""Time of each communicator's collectives, compared with a memory copy.

    python benchmarks/claims/collectives.py --worlds 2 4 --sizes 1MiB 64MiB --comms torch ring shm --json c.json

Each rank times a call from a common barrier; the slowest rank's time counts. algbw and busbw are those of nccl-tests
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md): algbw is the bytes of the unsharded tensor over
time; busbw is algbw times 2 (W-1)/W for an all-reduce, and times (W-1)/W for the other two. ``copy`` copies the
unsharded tensor once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm import empty_for
from zeroshard.lab.bench.ranks import chosen_device, close, communicator, on_ranks, slowest, synchronise
from zeroshard.lab.bench.report import Column, Report, Row, Spread, interleaved, milliseconds, spread_of
from zeroshard.lab.predict.workload import DTYPES
from zeroshard.settings.sizes import parse_size

OPS = ("reduce_scatter", "all_gather", "all_reduce")
SMALL_BYTES = 1 << 20  # up to this size a round takes the median of several calls


def bus_factor(op: str, world: int) -> float:
    """The factor from algbw to busbw; 0 for an operation that has no busbw."""
    return {"all_reduce": 2.0, "reduce_scatter": 1.0, "all_gather": 1.0}.get(op, 0.0) * (world - 1) / world


def rows_of(found: dict[str, Any], world: int, num_bytes: int, base: str) -> list[Row]:
    """A row for each contestant of one size and dtype; speed-ups over ``base`` are medians of the rounds' ratios."""
    rounds: dict[str, list[float]] = found["rounds_s"]
    rows = []
    for name, times in rounds.items():
        comm, _, op = name.partition(" ")
        spread = Spread.of(times)
        factor = bus_factor(op or comm, world)
        against = rounds.get(f"{base} {op}")
        row = {
            "world": world,
            "size": found["size"],
            "num_bytes": num_bytes,
            "dtype": found["dtype"],
            "op": op or comm,
            "comm": comm,
            "time_s": spread_of(times),
            "algbw_bytes_per_s": num_bytes / spread.median,
            "busbw_bytes_per_s": num_bytes / spread.median * factor if factor else None,
            "speedup": statistics.median(b / t for b, t in zip(against, times, strict=True)) if against else None,
            "rounds_s": times,
        }
        rows.append(row)
    order = [*OPS, "copy"]
    return sorted(rows, key=lambda row: order.index(row["op"]))


def _measure(
    rank: int, device: torch.device, sizes: dict[str, int], dtypes: list[str], comms: list[str], num_rounds: int
) -> list[dict[str, Any]]:
    made = {name: communicator(name) for name in comms}
    world = dist.get_world_size() if dist.is_initialized() else 1
    order = random.Random(0)  # the same on every rank
    found = []
    for size, num_bytes in sizes.items():
        for dtype in dtypes:
            calls = contestants(made, world, num_bytes, DTYPES[dtype], device)
            num_calls = 7 if num_bytes <= SMALL_BYTES else 1
            timers = {name: _timer(call, num_calls, device) for name, call in calls.items()}
            found.append({"size": size, "dtype": dtype, "rounds_s": interleaved(timers, num_rounds, order)})
            del calls, timers  # shared memory is closed after the tensors in it
    for comm in made.values():
        close(comm)
    return found


def contestants(
    comms: dict[str, Any], world: int, num_bytes: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], object]]:
    """The calls that a round times, by name; each has been called once already.

    Each communicator allocates its own unsharded tensor (`empty_for`), as the engine lets it do.
    """
    numel = num_bytes // dtype.itemsize // world * world
    wholes = {name: empty_for(comm, numel, dtype, device).fill_(1) for name, comm in comms.items()}
    one, other, shard = (torch.ones(n, dtype=dtype, device=device) for n in (numel, numel, numel // world))
    calls: dict[str, Callable[[], object]] = {"copy": lambda: one.copy_(other)}
    for name, comm in comms.items():
        whole = wholes[name]
        calls[f"{name} reduce_scatter"] = lambda comm=comm, whole=whole: comm.reduce_scatter(shard, whole).wait()
        calls[f"{name} all_gather"] = lambda comm=comm, whole=whole: comm.all_gather(whole, shard).wait()
        calls[f"{name} all_reduce"] = lambda comm=comm, whole=whole: comm.all_reduce(whole).wait()
    for call in calls.values():
        call()
    for tensor in (*wholes.values(), shard):
        tensor.fill_(0)  # sums of zeros neither overflow nor turn into slow denormals
    return calls


def _timer(call: Callable[[], object], num_calls: int, device: torch.device) -> Callable[[], float]:
    def seconds() -> float:
        times = []
        for _ in range(num_calls):
            synchronise(device)
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            call()
            synchronise(device)
            times.append(time.perf_counter() - start)
        return statistics.median(slowest(times))

    return seconds


def main() -> None:
    """Measure all combinations, and print a table; speed-ups are relative to the first communicator."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 4], help="ranks, as processes of this machine")
    parser.add_argument("--sizes", nargs="+", default=["64KiB", "1MiB", "16MiB", "64MiB"], help="of the tensor")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=DTYPES)
    parser.add_argument("--comms", nargs="+", default=["torch", "ring", "shm"], help="on a GPU: torch alone")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="cpu", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", type=Path, help="writes all that was measured")
    args = parser.parse_args()
    sizes = {size: parse_size("sizes", size) for size in args.sizes}
    device = chosen_device(args.device, max(args.worlds))
    rows: list[Row] = []
    for world in args.worlds:
        for found in on_ranks(_measure, world, sizes, args.dtypes, args.comms, args.rounds, device=device):
            rows += rows_of(found, world, sizes[found["size"]], args.comms[0])
    columns = [
        Column("world", "ranks"),
        *(Column(name, name) for name in ("size", "dtype", "op", "comm")),
        Column("time_s", "ms", milliseconds),
        Column("algbw_bytes_per_s", "algbw GB/s", _giga),
        Column("busbw_bytes_per_s", "busbw GB/s", _giga),
        Column("speedup", f"x {args.comms[0]}", "{:.2f}".format),
    ]
    report = Report("collectives", rows, columns)
    print(report.text())
    if args.json:
        report.write(args.json)


def _giga(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f}"


if __name__ == "__main__":
    main()
