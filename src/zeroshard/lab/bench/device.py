"""Calibration of this machine (`zeroshard bench device`): the planner reads it instead of a data sheet.

All ranks measure at the same time, because ranks of one machine share its cores and its memory. If four ranks share two
cores, the rate that one of them reaches here is the rate that it will reach in a training step.

    matmul      FLOP/s of matrix products as large as a model's, by dtype: the forward product and both of backward;
                on a CPU each by itself
    attention   FLOP/s of fused causal attention, forward and backward, as a share of the matmul rate
    memory      bytes/s of a copy, reads and writes; and those of an operation that allocates its output, as a share
    update      bytes/s of AdamW's update on the host, where offloaded states are updated
    bus         bytes/s of copies between host and device, in both directions at once; on a CPU of a copy in memory
    disk        bytes/s of a rank's file in the folder ``--disk``: `zeroshard.lab.bench.disk`
    gelu        on a CPU, tanh GELU, forward and backward: no other operation takes as long for its bytes
    wire        quantising for the wire, seconds per call and per element: `zeroshard.lab.bench.conversions`
    kernel      the least time of an operation: from a tiny module, forward and backward, Python and autograd included
    hook        on a CPU, the same module with an engine, per parameter: the extra time is that of the engine's hooks
    step        on a CPU, a step of a small model without collectives, over the sum of its operations' times alone
    link        seconds of a collective: a constant and bytes over a rate, fitted by least squares to medians over sizes
    beside      seconds by which a collective slows the computation that overlaps with it, fitted likewise: on a CPU the
                same cores do both, and a rank that waits for its turn on a core makes the other ranks wait

Times are those of the slowest rank, because a step waits for it. Rates are medians over rounds; the file also has each
round's time and the quartiles.
"""

from __future__ import annotations

import gc
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist

from zeroshard.comm import Communicator, Work, all_to_all
from zeroshard.comm.registry import comm_entry
from zeroshard.host import gc_frequency, host_memory
from zeroshard.lab.bench import conversions, operation_cases, whole_step
from zeroshard.lab.bench import disk as disks
from zeroshard.lab.bench.ranks import chosen_device, close, communicator, on_ranks, slowest, synchronise
from zeroshard.lab.bench.report import Column, Report, Row, Spread, environment, interleaved, spread_of
from zeroshard.lab.bench.settings import DeviceBench
from zeroshard.lab.predict.hardware import Calibration, Device, Link, write_calibration
from zeroshard.train.profiling.devices import Layout
from zeroshard.zero.offload.rank_files import file_of_rank

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
WARM_S = 0.1  # each timing repeats its call for about this long (at most 2000 calls)


def run(settings: DeviceBench) -> Report:
    """Measure on all ranks at once, and write the file ``settings.out``; its link is that of the first communicator."""
    where = chosen_device(settings.device, settings.nproc)
    report, calibration = measured(
        settings.nproc, settings.comms, settings.rounds, where, settings.threads, settings.disk
    )
    write(report, calibration, Path(settings.out))
    report.notes = (f"written: {settings.out}; `zeroshard plan --gpu {settings.out}` reads it",)
    return report


def measured(
    world: int, comms: Sequence[str], num_rounds: int, device: str, num_threads: int, disk: str = ""
) -> tuple[Report, Calibration]:
    """Measure on ``world`` ranks at once; the calibration's link is that of the first of ``comms``.

    ``disk``: the folder in which a disk is measured; empty: none is.
    """
    found = on_ranks(measure, world, list(comms), num_rounds, disk, device=device, num_threads=num_threads)
    calibration = calibration_of(found, world, comms[0] if comms else "", device, num_threads)
    columns = [Column("what", ""), Column("case", ""), Column("rate", "rate"), Column("spread", "quartiles")]
    facts = {"world": world, "num_threads": num_threads, "device_type": device}
    return Report("device", _rows(found), columns, facts), calibration


def write(report: Report, calibration: Calibration, path: Path) -> None:
    """Write the file that ``zeroshard plan`` and ``--plan.device`` read; it has all measurements too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_calibration(path, calibration, environment=environment(), **report.facts, rows=report.rows)


# -- what is timed ----------------------------------------------------------------------------------------------


def _timer(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """A function that measures seconds per call, repeating the call for about `WARM_S`.

    The number of repetitions is fixed here, and is the same on every rank.
    """
    call()
    synchronise(device)
    start = time.perf_counter()
    call()
    synchronise(device)
    once = slowest([time.perf_counter() - start])[0]
    num_calls = max(1, min(math.ceil(WARM_S / max(once, 1e-7)), 2000))

    def seconds() -> float:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        synchronise(device)
        return slowest([(time.perf_counter() - start) / num_calls])[0]

    return seconds


SIZES = {"256KiB": 1 << 18, "2MiB": 1 << 21, "16MiB": 1 << 24}
NUM_BESIDE = 4  # collectives in flight at once while computation overlaps with them


def measure(rank: int, device: torch.device, comms: list[str], num_rounds: int, disk: str = "") -> dict[str, Any]:
    """Seconds of each case by round, of the slowest rank, with the amounts that turn them into rates."""
    if disk:  # refused before all else is made ready, which takes seconds
        file_of_rank(Path(disk).expanduser(), rank).close()
    order = random.Random(0)  # the same on every rank
    amounts: dict[str, float] = {}
    calls: dict[str, Callable[[], float]] = {}

    def add(name: str, case: tuple[float, Callable[[], object]]) -> None:
        amounts[name], calls[name] = case[0], _timer(case[1], device)

    for dtype in operation_cases.dtypes(device):
        for m, k, n in operation_cases.products(device, dtype):
            name = f"matmul {str(dtype)[6:]} {m}x{k}x{n}"
            if device.type == "cuda":
                add(name, operation_cases.matmul(m, k, n, dtype, device))
            for layout, case in operation_cases.linear(m, k, n, dtype, device).items() if device.type == "cpu" else ():
                add(f"{name} {layout}", case)
    attention_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    add(f"attention {str(attention_dtype)[6:]}", operation_cases.attention(attention_dtype, device))
    add("copy", operation_cases.copy(device))
    add("anew", operation_cases.anew(device))
    add("update", operation_cases.host_update())
    add("bus", operation_cases.bus(device))
    if device.type == "cpu":
        add("gelu", operation_cases.gelu())
        add("hook", operation_cases.with_engine())
        add("step", whole_step.case())
    add("kernel", operation_cases.small_operations(device))
    for name, amount, call in conversions.cases(device):
        add(name, (amount, call))
    calls_of_disk: dict[str, Callable[[], float]] = {}
    computes = device.type == "cpu"
    for case in disks.cases(Path(disk).expanduser(), rank, computes=computes) if disk else ():
        add(case.name, case[1:3])
        calls_of_disk[case.name] = calls.pop(case.name)
        if case.lost_s is not None:
            amounts[f"{case.name} beside"], calls_of_disk[f"{case.name} beside"] = case.num_bytes, _of_all(case.lost_s)
    made = {name: communicator(name) for name in comms if not (device.type == "cuda" and comm_entry(name).cpu_only)}
    for name, comm in made.items() if dist.is_initialized() else ():
        for op in OPS:
            if not hasattr(comm, op):  # a user's own may lack ``all_to_all``, which only wire formats need
                continue
            for size, num_bytes in SIZES.items():
                amounts[f"{name} {op} {size}"] = num_bytes
                issue = _issue(comm, op, num_bytes, device)
                calls[f"{name} {op} {size}"] = _timer(lambda issue=issue: issue().wait(), device)
                if device.type == "cpu":
                    amounts[f"{name} {op} {size} beside"] = num_bytes
                    calls[f"{name} {op} {size} beside"] = _slowing(comm, op, num_bytes, device)
    gc.collect()
    gc_frequency.freeze()  # as the trainer does: the collector ignores the objects that live already
    seconds = interleaved(calls, num_rounds, order)
    seconds |= interleaved(calls_of_disk, num_rounds, order)  # without pauses, after which many a disk is faster
    gc_frequency.unfreeze()
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    for comm in made.values():
        close(comm)
    return {"seconds": seconds, "amounts": amounts, "memory_bytes": memory}


def _of_all(seconds: Callable[[], float]) -> Callable[[], float]:
    """The same of the slowest rank, where all begin at once."""

    def slowest_s() -> float:
        if dist.is_initialized():
            dist.barrier()
        return slowest([seconds()])[0]

    return slowest_s


def _slowing(comm: Communicator, op: str, num_bytes: int, device: torch.device) -> Callable[[], float]:
    """A function that measures by how many seconds a collective slows the computation that overlaps with it.

    `NUM_BESIDE` collectives run at once, and the computation lasts longer than all of them.
    """
    m, k, n = operation_cases.products(device, torch.float32)[0]
    _, product = operation_cases.matmul(m, k, n, torch.float32, device)
    issues = [_issue(comm, op, num_bytes, device) for _ in range(NUM_BESIDE)]

    def taken(num_products: int, beside: Sequence[Callable[[], Work]]) -> float:
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        works = [issue() for issue in beside]
        for _ in range(num_products):
            product()
        for work in works:
            work.wait()
        return slowest([time.perf_counter() - start])[0]

    taken(1, issues)
    alone = min(taken(0, issues) for _ in range(2))
    one = taken(1, ())
    num_products = int(slowest([math.ceil(max(3 * alone, WARM_S) / one)])[0])
    return lambda: (taken(num_products, issues) - taken(num_products, ())) / NUM_BESIDE


def _issue(comm: Communicator, op: str, num_bytes: int, device: torch.device) -> Callable[[], Work]:
    """A function that issues a collective in place, as the engine does; ``all_to_all`` has a separate output."""
    numel = max(num_bytes // 4 // comm.world_size, 1) * comm.world_size
    whole = torch.zeros(numel, device=device)
    there = torch.empty_like(whole) if op == "all_to_all" else whole
    own = slice(comm.rank * (numel // comm.world_size), (comm.rank + 1) * (numel // comm.world_size))
    calls: dict[str, Callable[[], Work]] = {
        "all_reduce": lambda: comm.all_reduce(whole),
        "reduce_scatter": lambda: comm.reduce_scatter(whole[own], whole),
        "all_gather": lambda: comm.all_gather(whole, whole[own]),
        "all_to_all": lambda: all_to_all(comm, there, whole),
    }
    return calls[op]


# -- from times to a calibration --------------------------------------------------------------------------------


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit ``seconds = constant + bytes * rate``; returns the constant and the rate (seconds per byte), both >= 0.

    Least squares of relative errors, so that small sizes count as much as large ones. Times below a fiftieth of the
    longest are noise: their errors are taken relative to that fiftieth.
    """
    least = max(seconds) / 50
    if least <= 0:
        return 0.0, 0.0
    weigh = torch.tensor([1 / max(s, least) for s in seconds], dtype=torch.float64)
    both = torch.stack([weigh, weigh * torch.tensor(sizes, dtype=torch.float64)], dim=1)
    wanted = (weigh * torch.tensor(seconds, dtype=torch.float64))[:, None]
    constant, rate = torch.linalg.lstsq(both, wanted).solution.flatten().tolist()
    if constant < 0:
        return 0.0, float(torch.linalg.lstsq(both[:, 1:], wanted).solution)
    return (constant, rate) if rate >= 0 else (float(torch.linalg.lstsq(both[:, :1], wanted).solution), 0.0)


_BESIDE_DISKS = frozenset(f"disk {kind} beside" for kind in ("walk", "gather", "write"))


def calibration_of(found: Mapping[str, Any], world: int, comm: str, device_type: str, num_threads: int) -> Calibration:
    """The `Calibration` of `zeroshard.lab.predict.hardware` that the measurements ``found`` by `measure` give."""
    middle = {name: statistics.median(times) for name, times in found["seconds"].items()}
    amounts = found["amounts"]

    def rate(*names: str) -> float:
        return sum(amounts[name] for name in names) / sum(middle[name] for name in names)

    by_dtype: dict[str, list[str]] = {}
    for name in amounts:
        if name.startswith("matmul "):
            by_dtype.setdefault(name.split()[1], []).append(name)
    matmul = {dtype: rate(*names) for dtype, names in by_dtype.items()}
    layouts: dict[str, dict[Layout, float]] = {
        dtype: {
            layout: rate(*of_it) / matmul[dtype]
            for layout in get_args(Layout)
            if (of_it := [name for name in names if name.split()[3:] == [layout]])
        }
        for dtype, names in by_dtype.items()
    }
    attention = next(name for name in amounts if name.startswith("attention "))
    name = torch.cuda.get_device_name() if device_type == "cuda" else f"this machine, {num_threads} threads a rank"
    memory = found["memory_bytes"] or psutil.virtual_memory().total // world
    device = Device(
        name=name,
        memory_bytes=memory,
        matmul_flops_per_s=matmul,
        matmul_layouts=layouts if device_type == "cpu" else {},
        bytes_per_s=rate("copy"),
        source=f"zeroshard bench device, {world} ranks at once, {environment()['processor']}",
        attention_share=min(rate(attention) / matmul[attention.split()[1]], 1.0),
        memory_share=min(rate("anew") / rate("copy"), 1.0),
        kernel_s=middle["kernel"] / amounts["kernel"],
        gelu_s=middle["gelu"] / amounts["gelu"] if "gelu" in amounts else 0.0,
        hook_s=max(middle["hook"] - middle["kernel"], 0.0) / amounts["hook"] if "hook" in amounts else 0.0,
        conversions=conversions.conversions_of(middle, amounts, fitted),
        device_type=device_type,
        host_memory_bytes=host_memory.total_bytes() or 0,
    )
    for name in ("update", "bus", "disk walk", "disk gather", "disk write"):
        if name in amounts:
            device = replace(device, **{f"{name.replace(' ', '_')}_bytes_per_s": rate(name)})
    beside = {name.split()[1]: s / amounts[name] for name, s in middle.items() if name in _BESIDE_DISKS}
    device = replace(device, disk_beside_s=beside)
    if "step" in middle:
        device = replace(device, in_step=whole_step.in_step(middle["step"], device))
    if world == 1 or not comm:
        return Calibration(device)
    return Calibration(device, _link_of(middle, world, comm, device))


def _link_of(middle: Mapping[str, float], world: int, comm: str, device: Device) -> Link:
    """The link as measured by collectives of ``comm`` among ``world`` ranks; ``middle``: median seconds by case."""
    collectives: dict[str, tuple[float, float]] = {}
    beside: dict[str, tuple[float, float]] = {}
    sizes = list(SIZES.values())
    for op in OPS:
        if f"{comm} {op} {next(iter(SIZES))}" not in middle:
            continue
        collectives[op] = fitted(sizes, [middle[f"{comm} {op} {size}"] for size in SIZES])
        if device.device_type == "cpu":
            # If computation hides the collective completely, the difference of two times may come out below 0.
            beside[op] = fitted(sizes, [max(middle[f"{comm} {op} {size} beside"], 0.0) for size in SIZES])
    constant, s_per_byte = collectives["all_gather"]
    return Link(
        name=f"{comm} among {world} ranks",
        latency_s=constant / (world - 1),
        bytes_per_s=(world - 1) / world / max(s_per_byte, 1e-15),
        source=device.source,
        call_s=0.0,
        share=1.0,
        num_ranks=world,
        collectives=collectives,
        beside=beside,
    )


RATES = {
    "matmul": "GFLOP/s",
    "attention": "GFLOP/s",
    "copy": "GB/s",
    "anew": "GB/s",
    "update": "GB/s",
    "bus": "GB/s",
    "disk": "GB/s",
    "gelu": "Gelement/s",
    "wire": "Gelement/s",
}


def _rows(found: Mapping[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for name, times in found["seconds"].items():
        what, *case = name.split()
        spread = Spread.of(times)
        row: Row = {"what": what, "case": " ".join(case), "time_s": spread_of(times), "rounds_s": times}
        amount = found["amounts"].get(name)
        if what in RATES and name not in _BESIDE_DISKS:
            rates, unit = spread.inverse(amount / 1e9), RATES[what]
        else:
            scale, unit = (1e6 / amount, "us") if what in ("kernel", "hook") else (1e3, "ms")
            rates = Spread(*(s * scale for s in (spread.median, spread.low, spread.high)), spread.num)
        if what not in (*RATES, "kernel", "hook", "step"):  # the name of a communicator
            alone = case[-1] != "beside"
            row |= {"what": "collective" if alone else "beside", "case": f"{what} {case[0]} {case[1]}"}
        row["rate"] = f"{rates.median:.3g} {unit}"
        row["spread"] = f"{rates.low:.3g}-{rates.high:.3g}"
        rows.append(row)
    return rows
