"""Our kernels compared with eager PyTorch, torch.compile and torch's fused optimizer.

    python benchmarks/gpu/kernel_times.py [OPERATION ...]    prints a table; without a GPU, of toy sizes

Only time on the device counts: calls are captured in a CUDA graph. The graph repeats the call on different tensors
until they add up to 256 MiB, so that L2 has nothing that it would not have in a training step. A call that cannot be
captured, because it waits for the device, is timed as launched and marked ``*``. Rounds visit the contestants in a
shuffled order; results are medians. Bytes are the fewest that the operation must move, even if an implementation moves
more; ``of copy`` is their rate as a share of a large copy's rate in the same run. Backward alone is a graph of its own,
over a forward pass that was run before.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it when kernels are imported

from kernel_cases import CASES, DEVICE, ON_GPU, Case

from zeroshard.lab.bench.report import Column, Report, environment

STREAM = torch.cuda.Stream() if ON_GPU else None  # of capture: a graph's backward runs on its forward's stream
FOOTPRINT_BYTES = 2**28 if ON_GPU else 1
COPY_BYTES = 2**30 if ON_GPU else 2**20
MODES = ("forward", "backward", "both")


@dataclass
class Row:
    """The measurements of one contestant in one mode of one case; ``captured``: whether a CUDA graph was timed."""

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


# ------------------------------------------------------------------------------------------------------- timing


def outputs_of(result: Any) -> list[Tensor]:
    """The tensors that a call returned, as a list."""
    return [result] if isinstance(result, Tensor) else list(result or ())


def prepare(case: Case, contestant: str, mode: str, sets: list[list[Tensor]]) -> list[Callable[[], object]]:
    """Make a function without arguments for each set of input tensors, which runs ``mode`` on them."""
    who = {"eager": "reference", "compile": "reference"}.get(contestant, contestant)

    def eager(*tensors: Tensor) -> Any:
        return case.call(who, *tensors)

    forward: Callable[..., Any] = eager
    if contestant == "compile":
        forward = torch.compile(eager, dynamic=False)

    def one(tensors: list[Tensor]) -> Callable[[], object]:
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


def timer(
    functions: list[Callable[[], object]], min_s: float, *, captures: bool = True
) -> tuple[Callable[[], float], bool]:
    """A function that measures seconds per call, and whether the calls were captured in a CUDA graph."""

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
    captured, go = captures, run
    if captures:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=STREAM):
                run()
            go = graph.replay
        except RuntimeError:  # a call that waits for the device cannot be captured
            torch.cuda.synchronize()
            captured = False

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
    """Rate of a large copy: bytes read and written, per second."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    measure, _ = timer([lambda: target.copy_(source)], 0.02)
    return COPY_BYTES / min(measure() for _ in range(5))


def peak_bytes(function: Callable[[], object]) -> int | None:
    """Peak memory of a call beyond what was allocated before it, in bytes; None without a GPU."""
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_case(case: Case, num_rounds: int, copy_rate: float, order: random.Random) -> list[Row]:
    """Measure each mode of ``case`` with each contestant that is available here, in interleaved rounds."""
    names = [n for n in case.contestants if n != "compile" or ON_GPU]  # on the CPU it takes minutes and shows nothing
    if "compile" in names:
        torch.compiler.reset()  # every case compiles the same code object, which may be compiled but a few times
    rows = []
    for mode in (mode for mode in MODES if mode in case.bytes):
        num_sets = max(1, -(-FOOTPRINT_BYTES // case.bytes[mode]))
        measures, peaks, captured = {}, {}, {}
        for name in names:
            # Each contestant has its own tensors, because some overwrite their inputs.
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


def table(operations: Sequence[str]) -> str:
    """Measure ``operations`` in bfloat16 and float32, and format a line for each contestant in each mode."""
    torch.manual_seed(0)
    rows: list[Row] = []
    order = random.Random(0)
    compiling: Any = torch._functorch.config
    # The compiled backward runs many times, so it may not donate its saved buffers.
    with compiling.patch(donated_buffer=False), torch.cuda.stream(STREAM) if STREAM else nullcontext():
        copy_rate = copy_bytes_per_s()
        for operation in operations:
            for dtype in ("bfloat16", "float32"):
                for case in CASES[operation](dtype):
                    rows += measure_case(case, 7 if ON_GPU else 1, copy_rate, order)
    columns = [
        *(Column(name, name) for name in ("operation", "shape", "dtype", "mode")),
        Column("contestant", ""),
        Column("seconds", "us", lambda seconds: f"{seconds * 1e6:.1f}"),
        Column("mark", ""),
        Column("bytes_per_s", "GB/s", lambda rate: f"{rate / 1e9:.1f}"),
        Column("of_copy", "of copy", lambda share: f"{share:.1%}"),
        Column("times_eager", "x eager", lambda ratio: f"{ratio:.2f}"),
        Column("peak_bytes", "peak MiB", lambda num_bytes: f"{num_bytes / 2**20:.1f}"),
    ]
    found = [{**asdict(row), "mark": "" if row.captured or not ON_GPU else "*"} for row in rows]
    device = environment()["gpu"] or "cpu, Triton's interpreter: toy sizes, no claims"
    return Report("kernels", found, columns, {}, [f"{device}; a copy: {copy_rate / 1e9:.1f} GB/s"]).text()


if __name__ == "__main__":
    if unknown := set(sys.argv[1:]) - set(CASES):
        sys.exit(f"unknown: {', '.join(unknown)}; choose of {', '.join(CASES)}")
    print(table(sys.argv[1:] or list(CASES)))
