"""What this machine can do: the calibration that the planner reads instead of a data sheet.

All ranks measure at the same time, because ranks of one machine share its cores and its memory: what one of four ranks
reaches on two cores is what a step of it will have.

    matmul      FLOP/s of products as large as a model's, by dtype, forward and both of backward
    attention   FLOP/s of fused causal attention, forward and backward, as a share of that
    memory      bytes/s of a copy, reads and writes; and of an operation that makes its output anew, as a share of that
    gelu        on a CPU, the GELU by tanh, forward and backward: no other operation takes as long for its bytes
    wire        seconds of a call and of an element, of quantising what travels: `zeroshard.lab.bench.conversions`
    kernel      the least time of an operation: of a small module's, forward and backward, Python and autograd included
    hook        on a CPU, the same with an engine, by parameter: what it takes longer are the engine's hooks
    link        seconds of a collective: a constant and bytes over a rate, fitted by least squares to medians over sizes
    beside      the seconds by which a collective slows the computation that it runs beside, fitted likewise: on a CPU
                the same cores do both, and a rank that waits for its turn on a core has the others wait

Times are those of the slowest rank, because a step waits for it; rates are medians over rounds; the file has every
spread.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from zeroshard.comm import Communicator, NullCommunicator, Work, all_to_all
from zeroshard.comm.registry import comm_entry
from zeroshard.lab.bench import conversions
from zeroshard.lab.bench.ranks import close, communicator, on_ranks, slowest, synchronise
from zeroshard.lab.bench.report import Chart, Column, Report, Row, Spread, environment, interleaved, spread_of
from zeroshard.lab.predict.hardware import Calibration, Device, Link, write_calibration
from zeroshard.zero import Zero

OPS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
WARM_S = 0.1  # how long a timing lasts at least, in calls


def run(world: int, comms: Sequence[str], num_rounds: int, device: str, num_threads: int) -> tuple[Report, Calibration]:
    """Measure, on ``world`` ranks at once; the calibration has the first of ``comms`` as its link."""
    found = on_ranks(_measure, world, list(comms), num_rounds, device=device, num_threads=num_threads)
    rows = _rows(found, world)
    calibration = calibration_of(found, world, comms[0] if comms else "", device, num_threads)
    columns = [
        Column("what", ""),
        Column("case", ""),
        Column("rate", "rate"),
        Column("spread", "quartiles"),
    ]
    chart = Chart("Collectives alone", "size", "time_s", "series", "ms", 1e3, {"what": "collective"})
    facts = {"world": world, "num_threads": num_threads, "device_type": device}
    return Report("device", rows, columns, [chart] if world > 1 else [], facts), calibration


def write(report: Report, calibration: Calibration, path: Path) -> None:
    """The file that ``zeroshard plan`` and ``--plan.device`` read, with all that was seen."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_calibration(path, calibration, environment=environment(), **report.facts, rows=report.rows)


# -- what is timed ----------------------------------------------------------------------------------------------


def _products(device: torch.device, dtype: torch.dtype) -> list[tuple[int, int, int]]:
    """Tokens, inputs, outputs: a small model's linear layers on a CPU, a large one's on a GPU."""
    if device.type == "cuda":
        return [(8192, 4096, 4096), (8192, 4096, 14336)]
    return [(256, 384, 1536), (512, 512, 2048)] if dtype == torch.float32 else [(256, 384, 1536)]


def _dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] + ([torch.float16] if device.type == "cuda" else [])


def _matmul(m: int, k: int, n: int, dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    """FLOPs, and the three products that a linear layer makes."""
    x, w, g = (torch.randn(*size, device=device).to(dtype) for size in ((m, k), (k, n), (m, n)))
    return 6.0 * m * k * n, lambda: (x @ w, x.t() @ g, g @ w.t())


def _attention(dtype: torch.dtype, device: torch.device) -> tuple[float, Callable[[], object]]:
    batch, heads, length, width = (4, 16, 2048, 128) if device.type == "cuda" else (4, 8, 256, 64)
    q, k, v = (
        torch.randn(batch, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad = torch.randn_like(q)

    def call() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v), grad)

    # Two products forward and five backward, of which a causal mask leaves half.
    return 14.0 * batch * heads * length * length * width / 2, call


def _copy(device: torch.device) -> tuple[float, Callable[[], object]]:
    source = torch.ones((256 if device.type == "cuda" else 16) * 2**20 // 4, device=device)
    target = torch.empty_like(source)
    return 2.0 * source.nbytes, lambda: target.copy_(source)


def _anew(device: torch.device) -> tuple[float, Callable[[], object]]:
    """An operation on tensors as large as a small model's activations, that makes its output anew."""
    numel = (64 if device.type == "cuda" else 1) * 2**20 // 4
    a, b = (torch.ones(numel, device=device) for _ in range(2))
    return 3.0 * a.nbytes, lambda: a + b


def _gelu() -> tuple[float, Callable[[], object]]:
    """GELU by tanh and its derivative, of as many elements as a small model's activations have."""
    x, grad = torch.randn(256, 1024), torch.randn(256, 1024)

    def call() -> object:
        return F.gelu(x, approximate="tanh"), torch.ops.aten.gelu_backward(grad, x, approximate="tanh")

    return 2.0 * x.numel(), call


class _Tiny(nn.Module):
    """Many operations that do next to nothing."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(8)
        )
        self.to(device)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.sum()


def _small_operations(device: torch.device) -> tuple[float, Callable[[], object]]:
    """How many operations (forward 5 a layer, backward 9), and a forward and backward of them."""
    net, x = _Tiny(device), torch.ones(2, 8, device=device)
    return 8.0 * (5 + 9), lambda: torch.autograd.grad(net(x), list(net.parameters()))


def _with_engine() -> tuple[float, Callable[[], object]]:
    """How many parameters, and the forward and backward of `_small_operations` where an engine takes gradients."""
    net, x = _Tiny(torch.device("cpu")), torch.ones(2, 8)
    zero = Zero(net, stage=1, units=list(net.layers), comm=NullCommunicator(2))
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.0)

    def call() -> object:
        net(x).backward()
        return optimizer.zero_grad()

    return float(len(list(net.parameters()))), call


def _timer(call: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Seconds a call, of as many as take `WARM_S`; how many is settled here, alike on every rank."""
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


def _collective(comm: Communicator, op: str, num_bytes: int, device: torch.device) -> Callable[[], object]:
    issue = _issue(comm, op, num_bytes, device)
    return lambda: issue().wait()


SIZES = {"256KiB": 1 << 18, "2MiB": 1 << 21, "16MiB": 1 << 24}
NUM_BESIDE = 4  # collectives that run beside computation at once


def _measure(rank: int, device: torch.device, comms: list[str], num_rounds: int) -> dict[str, Any]:
    """Seconds of each case by round, of the slowest rank."""
    order = random.Random(0)  # the same on every rank
    amounts: dict[str, float] = {}
    calls: dict[str, Callable[[], float]] = {}

    def add(name: str, case: tuple[float, Callable[[], object]]) -> None:
        amounts[name], calls[name] = case[0], _timer(case[1], device)

    for dtype in _dtypes(device):
        for m, k, n in _products(device, dtype):
            add(f"matmul {str(dtype)[6:]} {m}x{k}x{n}", _matmul(m, k, n, dtype, device))
    attention_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    add(f"attention {str(attention_dtype)[6:]}", _attention(attention_dtype, device))
    add("copy", _copy(device))
    add("anew", _anew(device))
    if device.type == "cpu":
        add("gelu", _gelu())
        add("hook", _with_engine())
    add("kernel", _small_operations(device))
    for name, amount, call in conversions.cases(device):
        add(name, (amount, call))
    made = {name: communicator(name) for name in comms if not (device.type == "cuda" and comm_entry(name).cpu_only)}
    several = dist.is_initialized()
    for name, comm in made.items() if several else ():
        for op in _served(comm):
            for size, num_bytes in SIZES.items():
                amounts[f"{name} {op} {size}"] = num_bytes
                calls[f"{name} {op} {size}"] = _timer(_collective(comm, op, num_bytes, device), device)
                if device.type == "cpu":
                    amounts[f"{name} {op} {size} beside"] = num_bytes
                    calls[f"{name} {op} {size} beside"] = _slowing(comm, op, num_bytes, device)
    seconds = interleaved(calls, num_rounds, order)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    for comm in made.values():
        close(comm)
    return {"seconds": seconds, "amounts": amounts, "memory_bytes": memory}


def _served(comm: Communicator) -> tuple[str, ...]:
    """`OPS`, of which a communicator of somebody's own may lack the exchange: only wire formats need it."""
    return tuple(op for op in OPS if hasattr(comm, op))


def _slowing(comm: Communicator, op: str, num_bytes: int, device: torch.device) -> Callable[[], float]:
    """Seconds by which each of a few collectives slows computation that is longer than all of them."""
    m, k, n = _products(device, torch.float32)[0]
    _, product = _matmul(m, k, n, torch.float32, device)
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
    """A collective, in place as the engine's are; an exchange has a place of its own for what comes."""
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


# -- what it comes to -------------------------------------------------------------------------------------------


def fitted(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The constant and the seconds a byte of ``seconds = constant + bytes * rate``; neither is negative.

    Least squares of relative errors, so that small sizes count as much as large ones; times below a fiftieth of the
    longest are all noise, and count as if they were that.
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


def calibration_of(found: Mapping[str, Any], world: int, comm: str, device_type: str, num_threads: int) -> Calibration:
    """What `zeroshard.lab.predict.hardware` keeps of the measurements."""
    middle = {name: statistics.median(times) for name, times in found["seconds"].items()}
    amounts = found["amounts"]

    def rate(name: str) -> float:
        return amounts[name] / middle[name]

    by_dtype: dict[str, list[str]] = {}
    for name in amounts:
        if name.startswith("matmul "):
            by_dtype.setdefault(name.split()[1], []).append(name)
    matmul = {
        dtype: sum(amounts[n] for n in names) / sum(middle[n] for n in names) for dtype, names in by_dtype.items()
    }
    attention = next(name for name in amounts if name.startswith("attention "))
    name = torch.cuda.get_device_name() if device_type == "cuda" else f"this machine, {num_threads} threads a rank"
    memory = found["memory_bytes"] or psutil.virtual_memory().total // world
    device = Device(
        name=name,
        memory_bytes=memory,
        matmul_flops_per_s=matmul,
        bytes_per_s=rate("copy"),
        source=f"zeroshard bench device, {world} ranks at once, {environment()['processor']}",
        attention_share=min(rate(attention) / matmul[attention.split()[1]], 1.0),
        memory_share=min(rate("anew") / rate("copy"), 1.0),
        kernel_s=middle["kernel"] / amounts["kernel"],
        gelu_s=middle["gelu"] / amounts["gelu"] if "gelu" in amounts else 0.0,
        hook_s=max(middle["hook"] - middle["kernel"], 0.0) / amounts["hook"] if "hook" in amounts else 0.0,
        conversions=conversions.conversions_of(middle, amounts, fitted),
        device_type=device_type,
    )
    if world == 1 or not comm:
        return Calibration(device)
    return Calibration(device, _link_of(middle, world, comm, device))


def _link_of(middle: Mapping[str, float], world: int, comm: str, device: Device) -> Link:
    """The link that collectives of ``comm`` among ``world`` ranks show; ``middle``: median seconds by measurement."""
    collectives: dict[str, tuple[float, float]] = {}
    beside: dict[str, tuple[float, float]] = {}
    sizes = list(SIZES.values())
    for op in OPS:
        if f"{comm} {op} {next(iter(SIZES))}" not in middle:
            continue
        collectives[op] = fitted(sizes, [middle[f"{comm} {op} {size}"] for size in SIZES])
        if device.device_type == "cpu":
            # Where computation hid it all, the difference of two times may come out below 0.
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


def _rows(found: Mapping[str, Any], world: int) -> list[Row]:
    rows: list[Row] = []
    for name, times in found["seconds"].items():
        what, *case = name.split()
        spread = Spread.of(times)
        row: Row = {"what": what, "case": " ".join(case), "time_s": spread_of(times), "rounds_s": times}
        amount = found["amounts"].get(name)
        if what in ("matmul", "attention"):
            rates, unit = spread.inverse(amount / 1e9), "GFLOP/s"
        elif what in ("copy", "anew"):
            rates, unit = spread.inverse(amount / 1e9), "GB/s"
        elif what == "gelu" or what == "wire":
            rates, unit = spread.inverse(amount / 1e9), "Gelement/s"
        elif what in ("kernel", "hook"):
            rates, unit = (
                Spread(*(s / amount * 1e6 for s in (spread.median, spread.low, spread.high)), spread.num),
                "us",
            )
        else:
            alone = case[-1] != "beside"
            row |= {"what": "collective" if alone else "beside", "case": f"{what} {case[0]} {case[1]}"}
            row |= {"series": f"{what} {case[0]}", "size": case[1]}
            rates, unit = Spread(*(s * 1e3 for s in (spread.median, spread.low, spread.high)), spread.num), "ms"
        row["rate"] = f"{rates.median:.3g} {unit}"
        row["spread"] = f"{rates.low:.3g}-{rates.high:.3g}"
        rows.append(row)
    return rows
