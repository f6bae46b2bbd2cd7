"""Our kernels beside eager PyTorch, torch.compile, torch's fused optimizer and Liger-Kernel (where installed).

Time is the device's alone: each call is captured in a CUDA graph, as often as it takes for its tensors to be 256 MiB,
every time on other tensors, so that nothing is found in L2 that a training step would not find there. What cannot be
captured (it waits for the device) is timed as launched and marked ``*``. Rounds visit the contestants in a shuffled
order; figures are medians. Bytes are those that must move, whoever moves more; ``of copy`` is their rate as a share of
a large copy's in the same run. Backward alone is a second graph over a forward pass that was run before.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from zeroshard import kernels
from zeroshard.kernels import AdamWOptions
from zeroshard.kernels.adamw import Pieces
from zeroshard.lab.bench.report import Chart, Column, Report, environment, spread_of

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
STREAM = torch.cuda.Stream() if ON_GPU else None  # a graph's backward runs on the stream that its forward ran on
FOOTPRINT_BYTES = 2**28 if ON_GPU else 1
COPY_BYTES = 2**30 if ON_GPU else 2**20
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
MODES = ("forward", "backward", "both")
OPTIONS = AdamWOptions(lr=1e-4, beta1=0.9, beta2=0.95, weight_decay=0.1)


@dataclass
class Case:
    """One operation at one size.

    Attributes:
        bytes: that must move, by mode; a mode that is not there is not measured.
        inputs: makes fresh tensors.
        call: (kernels, inputs) -> outputs; ``kernels`` as in `zeroshard.kernels.choose`.
        wanted: indices of the inputs that get a gradient.
        contestants: names, the first of which the others are held against.
    """

    operation: str
    shape: str
    dtype: str
    bytes: dict[str, int]
    inputs: Callable[[], list[Tensor]]
    call: Callable[..., Any]
    wanted: tuple[int, ...] = ()
    contestants: tuple[str, ...] = ("eager", "compile", "triton", "liger")


@dataclass
class Row:
    operation: str
    shape: str
    dtype: str
    mode: str
    contestant: str
    seconds: float
    bytes_per_s: float
    of_copy: float
    times_eager: float
    peak_bytes: int | None
    captured: bool
    rounds: list[float] = field(default_factory=list)


# -------------------------------------------------------------------------------------------------------- cases


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(dtype)


def norm_cases(name: str, dtype: str) -> Iterator[Case]:
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    rows, widths = (16384, (768, 1600, 4096, 8192)) if ON_GPU else (24, (64,))
    for width in widths:
        n = rows * width
        for fused in (False, True):

            def inputs(width: int = width, fused: bool = fused) -> list[Tensor]:
                made = [normal(rows, width, dtype=kind), *(normal(width, dtype=kind) for _ in range(2))]
                return [*made, normal(rows, width, dtype=kind)] if fused else made

            def call(who: str, x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Any:
                if name == "layer_norm":
                    return kernels.layer_norm(x, weight, bias, residual=residual, kernels=who)
                return kernels.rms_norm(x, weight, residual=residual, kernels=who)

            # Forward reads x (and the residual) and writes y (and the sum). Backward reads two and writes one, and
            # with a residual reads the sum's own gradient too.
            moved = {"forward": (4 if fused else 2) * n * size, "backward": (4 if fused else 3) * n * size}
            wanted = (0, 1, 3) if fused else (0, 1)
            wanted = (*wanted, 2) if name == "layer_norm" else wanted
            shape = f"{rows} x {width}{' + residual' if fused else ''}"
            yield Case(name, shape, dtype, with_both(moved), inputs, call, wanted)


def rope_cases(dtype: str) -> Iterator[Case]:
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    shapes = ((8, 12, 12, 1024, 64), (4, 32, 8, 4096, 128)) if ON_GPU else ((1, 2, 1, 4, 8),)
    for B, H, K, T, D in shapes:

        def inputs(B: int = B, H: int = H, K: int = K, T: int = T, D: int = D) -> list[Tensor]:
            qk = [normal(B, T, heads, D, dtype=kind) for heads in (H, K)]
            angles = torch.rand(T, D // 2, device=DEVICE)
            return [*(x.transpose(1, 2) for x in qk), angles.cos(), angles.sin()]

        def call(who: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            # A view is no leaf: what a model turns in place is a projection's output.
            return kernels.rope(q.view_as(q), k.view_as(k), cos, sin, inplace=True, kernels=who)

        moved = 2 * B * (H + K) * T * D * size
        yield Case("rope", f"{B} x {H}+{K} x {T} x {D}", dtype, with_both({"forward": moved, "backward": moved}),
                   inputs, call, (0, 1))  # fmt: skip


def gated_cases(name: str, dtype: str) -> Iterator[Case]:
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, width in ((16384, 2048), (8192, 11008), (8192, 14336)) if ON_GPU else ((8, 32),):

        def inputs(rows: int = rows, width: int = width) -> list[Tensor]:
            return [normal(rows, width, dtype=kind) for _ in range(2)]

        def call(who: str, gate: Tensor, up: Tensor) -> Any:
            return getattr(kernels, name)(gate, up, kernels=who)

        n = rows * width * size
        moved = with_both({"forward": 3 * n, "backward": 5 * n})
        yield Case(name, f"{rows} x {width}", dtype, moved, inputs, call, (0, 1))


def cross_entropy_cases(dtype: str) -> Iterator[Case]:
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    for rows, vocab in ((8192, 50257), (8192, 50304), (4096, 128256)) if ON_GPU else ((4, 97),):

        def inputs(rows: int = rows, vocab: int = vocab) -> list[Tensor]:
            return [normal(rows, vocab, dtype=kind), torch.randint(vocab, (rows,), device=DEVICE)]

        def call(who: str, logits: Tensor, targets: Tensor) -> Any:
            logits = logits.view_as(logits)  # no leaf, as a projection's output is none
            return kernels.cross_entropy(logits, targets, inplace=True, check_targets=False, kernels=who)

        moved = {"both": 2 * rows * vocab * size}  # read once, and the gradient written in its place
        yield Case("cross_entropy", f"{rows} x {vocab}", dtype, moved, inputs, call, (0,))


def linear_cross_entropy_cases(dtype: str) -> Iterator[Case]:
    kind, size = DTYPES[dtype], DTYPES[dtype].itemsize
    shapes = ((16384, 768, 50304), (8192, 2048, 128256)) if ON_GPU else ((8, 16, 97),)
    for rows, width, vocab in shapes:

        def inputs(rows: int = rows, width: int = width, vocab: int = vocab) -> list[Tensor]:
            weight = normal(vocab, width, dtype=kind) * 0.02
            return [normal(rows, width, dtype=kind), weight, torch.randint(vocab, (rows,), device=DEVICE)]

        def call(who: str, hidden: Tensor, weight: Tensor, targets: Tensor) -> Any:
            return kernels.linear_cross_entropy(hidden, weight, targets, check_targets=False, kernels=who)

        moved = {"both": 2 * (rows + vocab) * width * size}  # it is bound by its products: a share of copy says little
        yield Case("linear_cross_entropy", f"{rows} x {width} x {vocab}", dtype, moved, inputs, call, (0, 1))


def sum_of_squares_cases(dtype: str) -> Iterator[Case]:
    numel = 124_000_000 if ON_GPU else 5000

    def call(who: str, flat: Tensor) -> Any:
        return kernels.sum_of_squares(flat, kernels=who)

    def inputs() -> list[Tensor]:
        return [normal(numel, dtype=DTYPES[dtype])]

    moved = {"forward": numel * DTYPES[dtype].itemsize}
    yield Case("sum_of_squares", f"{numel}", dtype, moved, inputs, call, contestants=("eager", "compile", "triton"))


def adamw_cases(dtype: str) -> Iterator[Case]:
    """fp32 states with clipping, in bf16 with a bf16 copy beside the masters."""
    if dtype == "bfloat16" and not ON_GPU:
        return
    numels = (124_000_000, 774_000_000) if ON_GPU else (5000,)
    copies = dtype == "bfloat16"
    for numel in numels:
        kept: dict[int, Any] = {}

        def inputs(numel: int = numel) -> list[Tensor]:
            made = [normal(numel, dtype=torch.float32) for _ in range(3)]
            made += [torch.rand(numel, device=DEVICE), torch.full((), 0.5, device=DEVICE)]
            return [*made, made[0].bfloat16()] if copies else made

        def call(who: str, *tensors: Tensor, kept: dict[int, Any] = kept) -> Any:
            param, grad, m, v, scale, *copy = tensors
            if who == "triton":
                pieces = kept.setdefault(param.data_ptr(), Pieces())
                return kernels.adamw(param, grad, m, v, step=10, options=OPTIONS, grad_scale=scale, pieces=pieces,
                                     copies=copy[0] if copy else None, kernels=who)  # fmt: skip
            optimizer = kept.get(param.data_ptr())
            if optimizer is None:
                leaf = torch.nn.Parameter(param)
                leaf.grad = grad
                how = {"fused": True} if who == "fused" else {"foreach": True}
                optimizer = torch.optim.AdamW([leaf], 1e-4, (0.9, 0.95), weight_decay=0.1, capturable=ON_GPU, **how)
                kept[param.data_ptr()] = optimizer
            grad.mul_(scale)
            optimizer.step()
            return copy[0].copy_(param) if copy else None

        moved = {"forward": (30 if copies else 28) * numel}
        yield Case("adamw", f"{numel}{' + bf16 copy' if copies else ''}", "float32", moved, inputs, call,
                   contestants=("eager", "fused", "triton"))  # fmt: skip


def with_both(moved: dict[str, int]) -> dict[str, int]:
    return {**moved, "both": moved["forward"] + moved["backward"]}


CASES: dict[str, Callable[[str], Iterator[Case]]] = {
    "layer_norm": lambda dtype: norm_cases("layer_norm", dtype),
    "rms_norm": lambda dtype: norm_cases("rms_norm", dtype),
    "rope": rope_cases,
    "swiglu": lambda dtype: gated_cases("swiglu", dtype),
    "geglu": lambda dtype: gated_cases("geglu", dtype),
    "cross_entropy": cross_entropy_cases,
    "linear_cross_entropy": linear_cross_entropy_cases,
    "adamw": adamw_cases,
    "sum_of_squares": sum_of_squares_cases,
}


# ------------------------------------------------------------------------------------------------------- timing


def outputs_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result or ())


def prepare(case: Case, contestant: str, mode: str, sets: list[list[Tensor]]) -> list[Callable[[], None]]:
    """One function without arguments for each set of tensors."""
    who = {"eager": "reference", "compile": "reference"}.get(contestant, contestant)

    def forward(*tensors: Tensor) -> Any:
        return case.call(who, *tensors)

    if contestant == "compile":
        torch.compiler.reset()
        forward = torch.compile(forward, dynamic=False)

    def one(tensors: list[Tensor]) -> Callable[[], None]:
        tensors = [x.detach().requires_grad_(i in case.wanted) for i, x in enumerate(tensors)]
        wanted = [tensors[i] for i in case.wanted]
        grads = [torch.randn_like(y) if y.ndim else torch.ones_like(y) for y in outputs_of(forward(*tensors))]
        if mode == "forward":
            return lambda: forward(*tensors)
        if mode == "both":
            return lambda: torch.autograd.grad(outputs_of(forward(*tensors)), wanted, grads)
        outputs = outputs_of(forward(*tensors))
        return lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

    return [one(tensors) for tensors in sets]


def timer(functions: list[Callable[[], None]], min_s: float) -> tuple[Callable[[], float], bool]:
    """A function that measures seconds a call, and whether the calls could be captured."""

    def run() -> None:
        for function in functions:
            function()

    if not ON_GPU:

        def on_host() -> float:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) / len(functions)

        return on_host, False
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    captured = True
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=STREAM):
            run()
        go = graph.replay
    except RuntimeError:  # it waits for the device in the middle
        torch.cuda.synchronize()
        go, captured = run, False

    def on_device() -> float:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        repeats, seconds = 1, 0.0
        while seconds < min_s:
            start.record()
            for _ in range(repeats):
                go()
            stop.record()
            stop.synchronize()
            seconds = start.elapsed_time(stop) / 1e3
            repeats *= 2
        return seconds / (repeats // 2) / len(functions)

    return on_device, captured


def copy_bytes_per_s() -> float:
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    measure, _ = timer([lambda: target.copy_(source)], 0.02)
    return COPY_BYTES / min(measure() for _ in range(5))


def peak_bytes(function: Callable[[], None]) -> int | None:
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(case: Case, num_rounds: int, copy_rate: float, order: random.Random) -> list[Row]:
    names = [n for n in case.contestants if n != "liger" or (ON_GPU and find_spec("liger_kernel"))]
    names = [n for n in names if n != "compile" or ON_GPU]  # on the CPU it takes minutes to tell nothing
    rows = []
    for mode in (mode for mode in MODES if mode in case.bytes):
        num_sets = max(1, -(-FOOTPRINT_BYTES // case.bytes[mode]))
        measures, peaks, captured = {}, {}, {}
        for name in names:
            # Each has tensors of its own: some write over what they were given.
            functions = prepare(case, name, mode, [case.inputs() for _ in range(num_sets)])
            functions[0]()
            peaks[name] = peak_bytes(functions[0])
            measures[name], captured[name] = timer(functions, 0.01)
        rounds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(num_rounds):
            for name in order.sample(names, len(names)):
                rounds[name].append(measures[name]())
        medians = {name: statistics.median(times) for name, times in rounds.items()}
        for name in names:
            rate = case.bytes[mode] / medians[name]
            rows.append(
                Row(
                    operation=case.operation,
                    shape=case.shape,
                    dtype=case.dtype,
                    mode=mode,
                    contestant=name,
                    seconds=medians[name],
                    bytes_per_s=rate,
                    of_copy=rate / copy_rate,
                    times_eager=medians[names[0]] / medians[name],
                    peak_bytes=peaks[name],
                    captured=captured[name],
                    rounds=rounds[name],
                )
            )
        del measures, functions
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    return rows


# ------------------------------------------------------------------------------------------------------- report


def run(
    operations: Sequence[str], dtypes: Sequence[str], num_rounds: int, *, seen: Callable[[Row], None] = lambda row: None
) -> Report:
    """Measure; ``seen`` is told each row as it comes.

    Args:
        operations: keys of `CASES`.
        dtypes: keys of `DTYPES`.
        num_rounds: 0: 7 on a GPU, else 1.
    """
    torch.manual_seed(0)
    donates = torch._functorch.config.donated_buffer
    torch._functorch.config.donated_buffer = False  # a compiled backward is to run again and again
    try:
        with torch.cuda.stream(STREAM) if STREAM else nullcontext():
            return _measured(operations, dtypes, num_rounds or (7 if ON_GPU else 1), seen)
    finally:
        torch._functorch.config.donated_buffer = donates


def _measured(operations: Sequence[str], dtypes: Sequence[str], num_rounds: int, seen: Callable[[Row], None]) -> Report:
    copy_rate = copy_bytes_per_s()
    rows: list[Row] = []
    order = random.Random(0)
    for operation in operations:
        for dtype in dtypes:
            for case in CASES[operation](dtype):
                measured = measure_case(case, num_rounds, copy_rate, order)
                rows += measured
                for row in measured:
                    seen(row)
    facts = {
        "device": environment()["gpu"] or "cpu, Triton's interpreter: toy sizes, no claims",
        "copy_bytes_per_s": copy_rate,
        "footprint_bytes": FOOTPRINT_BYTES,
    }
    columns = [
        Column("operation", "operation"),
        Column("shape", "shape"),
        Column("dtype", "dtype"),
        Column("mode", "mode"),
        Column("contestant", ""),
        Column("seconds", "us", lambda seconds: f"{seconds * 1e6:.1f}"),
        Column("mark", ""),
        Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:.1f}"),
        Column("of_copy", "of copy", lambda share: f"{share:.1%}"),
        Column("times_eager", "x eager", lambda ratio: f"{ratio:.2f}"),
        Column("peak_bytes", "peak MiB", lambda num_bytes: f"{num_bytes / 2**20:.1f}"),
    ]
    found = [
        {
            **asdict(row),
            "mark": "" if row.captured or not ON_GPU else "*",
            "case": f"{row.operation}\n{row.shape}",
            "time_s": spread_of(row.rounds),
        }
        for row in rows
    ]
    charts = [
        Chart(
            f"{mode}, {dtype}", "case", "times_eager", "contestant", "times eager", 1.0, {"mode": mode, "dtype": dtype}
        )
        for dtype in dtypes
        for mode in MODES
        if any(row.mode == mode and row.dtype == dtype for row in rows)
    ]
    return Report("kernels", found, columns, charts, facts, [f"{facts['device']}; a copy: {copy_rate / 1e9:.1f} GB/s"])
