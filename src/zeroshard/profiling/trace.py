"""One Chrome trace for all ranks: what each did, on one clock, with the units' names on the spans.

Open it in https://ui.perfetto.dev or chrome://tracing: a process for each rank, under it the rank's threads, and in a
track of its own the communication that was under way, whoever waited for it or not.

    rank 0   main       | forward blocks.0 | forward blocks.1 | ... | backward blocks.1 | ...
             under way     |--- all_gather blocks.1/weights ---|        |-- reduce_scatter blocks.1/grads --|

[Note: One clock]
    torch's profiler stamps events with the host's wall clock, and `time.perf_counter` with another that knows no date:
    `wall_minus_monotonic_s` ties the two. Ranks of one host then agree. Between hosts, `clock_offsets` takes what each
    rank read after the same barriers: nobody leaves one before all have come, so that readings differ by the clocks'
    offset and by how long the news took. The median over rounds is as good as a barrier is fast.

[Note: Names of units]
    A module's own hooks tell when its forward begins and ends; hooks on the gradients of its outputs tell when its
    backward begins. One backward span ends where the next begins, so that they tile the backward pass, in the order in
    which autograd goes, whether or not anything needs the gradients of a unit's inputs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from zeroshard.profiling.overlap import TimedOperation
from zeroshard.regular_files import LOG_BYTES, read_text

Trace = dict[str, Any]
UNDER_WAY = 1 << 20  # the thread id of the track of communication, which no thread has
_RANK_STRIDE = 1_000_000_000  # between ids of flows of two ranks
_US = 1e6


def wall_minus_monotonic_s() -> float:
    """What to add to `time.perf_counter` to have the host's wall clock; the best of several readings."""
    readings = []
    for _ in range(9):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """Seconds that each rank's wall clock is ahead of rank 0's. See [Note: One clock].

    Args:
        readings: for each round, what every rank read after a barrier.
    """
    by_rank = zip(*([reading - round_[0] for reading in round_] for round_ in readings), strict=True)
    return [statistics.median(differences) for differences in by_rank]


@contextmanager
def named_units(units: Iterable[tuple[str, nn.Module]]) -> Generator[None]:
    """In this block, each unit's forward and backward are spans of torch's profiler. See [Note: Names of units]."""
    spans = _Spans()
    handles: list[Any] = []
    for name, module in units:
        handles.append(module.register_forward_pre_hook(spans.forward_begins(name), prepend=True))
        handles.append(module.register_forward_hook(spans.forward_ends(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        spans.end_all()


class _Spans:
    """The spans that are open now, innermost last."""

    def __init__(self) -> None:
        self._forward: list[Any] = []
        self._backward: Any = None

    def forward_begins(self, name: str) -> Any:
        """The forward pre-hook of the module that the trace calls ``name``."""

        def hook(module: nn.Module, args: Any) -> None:
            if not _in_backward():
                self._forward.append(_opened(f"forward {name}"))

        return hook

    def forward_ends(self, name: str) -> Any:
        """The forward hook of that module; its backward begins when its output's gradient comes."""

        def backward_begins(grad: Tensor) -> None:
            if self._backward is None:
                torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._end_backward()
            self._backward = _opened(f"backward {name}")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _in_backward() or not self._forward:
                return
            self._forward.pop().__exit__(None, None, None)
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
            for leaf in outputs[:1]:
                leaf.register_hook(backward_begins)

        return hook

    def _end_backward(self) -> None:
        if self._backward is not None:
            self._backward.__exit__(None, None, None)
            self._backward = None

    def end_all(self) -> None:
        """Close all spans that are open."""
        self._end_backward()
        while self._forward:  # of a forward that an exception ended
            self._forward.pop().__exit__(None, None, None)


def _opened(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class RankTrace:
    """Torch's profiler around some steps of one rank.

    Args:
        units: names and modules, for the spans.
        device: cpu, or the one whose kernels are traced too.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._names = named_units(units)

    def start(self) -> None:
        """Begin to record."""
        self._profile.__enter__()
        self._names.__enter__()

    def stop(self, path: Path, operations: Iterable[TimedOperation] = ()) -> None:
        """End, and write this rank's events to ``path``.

        Args:
            path: of a file for this rank alone.
            operations: what was under way, by `time.perf_counter`.
        """
        self._names.__exit__(None, None, None)
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(with_operations(trace, operations, wall_minus_monotonic_s())), encoding="utf-8")


def with_operations(trace: Trace, operations: Iterable[TimedOperation], wall_minus_monotonic: float) -> Trace:
    """``trace`` with a track of what was under way; its own time base is kept."""
    base_s = trace.get("baseTimeNanoseconds", 0) / 1e9
    pid = next((event["pid"] for event in trace["traceEvents"] if isinstance(event.get("pid"), int)), 0)
    events: list[dict[str, Any]] = [
        {
            "ph": "X",
            "cat": "communication",
            "name": operation.label,
            "pid": pid,
            "tid": UNDER_WAY,
            "ts": (operation.issued_s + wall_minus_monotonic - base_s) * _US,
            "dur": (operation.ended_s - operation.issued_s) * _US,
        }
        for operation in _one_after_another(operations)
    ]
    name = {"ph": "M", "name": "thread_name", "pid": pid, "tid": UNDER_WAY, "args": {"name": "communication under way"}}
    return {**trace, "traceEvents": [*trace["traceEvents"], *([name] if events else []), *events]}


def merged(traces: Mapping[int, Trace], offsets_s: Sequence[float] = ()) -> Trace:
    """One trace of all ranks, each a process of its own, in order; it begins with their first event.

    Args:
        traces: by rank, as torch's profiler writes them.
        offsets_s: by rank, what `clock_offsets` found; empty: all clocks agree.
    """
    bases_ns = {rank: int(trace.get("baseTimeNanoseconds", 0)) for rank, trace in traces.items()}
    first_ns = min(bases_ns.values(), default=0)
    names: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for rank, trace in sorted(traces.items()):
        shift_us = (bases_ns[rank] - first_ns) / 1e3 - (offsets_s[rank] * _US if offsets_s else 0.0)
        names.append(_metadata(rank, "process_name", {"name": f"rank {rank}"}))
        names.append(_metadata(rank, "process_sort_index", {"sort_index": rank}))
        for event in trace["traceEvents"]:
            if not isinstance(event.get("pid"), int):  # kineto's own summary tracks
                continue
            moved = {**event, "pid": rank}
            if event["ph"] == "M":
                names += [moved] if event["name"].startswith("thread_") else []
                continue
            moved["ts"] = float(event["ts"]) + shift_us
            if event["ph"] in ("s", "t", "f"):  # an arrow belongs to its rank
                moved["id"] = int(event["id"]) + rank * _RANK_STRIDE
            events.append(moved)
    events.sort(key=lambda event: event["ts"])
    start_us = events[0]["ts"] if events else 0.0
    for event in events:
        event["ts"] -= start_us
    base_ns = first_ns + round(start_us * 1e3)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": [*names, *events]}


def merge_files(paths: Mapping[int, Path], target: Path, offsets_s: Sequence[float] = ()) -> None:
    """Write `merged` of the ranks' files to ``target``, and remove them."""
    traces = {rank: json.loads(read_text(path, LOG_BYTES)) for rank, path in paths.items()}
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps(merged(traces, offsets_s)), encoding="utf-8")
    unfinished.replace(target)
    for path in paths.values():
        path.unlink()


def _one_after_another(operations: Iterable[TimedOperation]) -> list[TimedOperation]:
    """A track shows one thing at a time: each begins where the one before it has ended, as in `overlap`."""
    shown: list[TimedOperation] = []
    for operation in operations:
        start = max(operation.issued_s, shown[-1].ended_s) if shown else operation.issued_s
        shown.append(TimedOperation(operation.label, start, max(operation.ended_s, start)))
    return shown


def _metadata(rank: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "ts": 0, "args": args}
