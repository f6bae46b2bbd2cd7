"""One Chrome trace of all ranks, on one clock, with spans named after the model's units.

Open it in https://ui.perfetto.dev or chrome://tracing. Each rank is a process with the rank's threads. A track of its
own shows the collectives that were in flight, whether or not anybody waited for them.

    rank 0   main       | forward blocks.0 | forward blocks.1 | ... | backward blocks.1 | ...
             under way     |--- all_gather blocks.1/weights ---|        |-- reduce_scatter blocks.1/grads --|

[Note: One clock]
    torch's profiler stamps events by the host's wall clock. `time.perf_counter` has another origin;
    `wall_minus_monotonic_s` gives the difference. After that the times of ranks on one host agree. Between hosts,
    `clock_offsets` compares the times that all ranks read after the same barriers. No rank leaves a barrier before all
    have come, so these readings differ only by the clocks' offset and by the barrier's latency. The median over several
    rounds is as precise as a barrier is fast.

[Note: Names of units]
    Hooks on a module mark the begin and end of its forward; a hook on the gradient of its output marks the begin of its
    backward. A backward span ends where the next one begins. So the spans cover the backward pass without gaps, in
    autograd's order, whether or not a unit's inputs need gradients.
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

from zeroshard.profiling.overlap import TimedOperation
from zeroshard.regular_files import LOG_BYTES, read_text
from zeroshard.torch_internals import at_end_of_backward, in_backward, tree_leaves

Trace = dict[str, Any]
UNDER_WAY = 1 << 20  # thread id of the communication track; no real thread has it
_RANK_STRIDE = 1_000_000_000  # offset between the flow ids (arrows) of neighbouring ranks
_US = 1e6


def wall_minus_monotonic_s() -> float:
    """Return the seconds to add to `time.perf_counter` to get the host's wall clock; the best of several readings."""
    readings = []
    for _ in range(9):
        before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
        readings.append((after - before, wall - (before + after) / 2))
    return min(readings)[1]


def clock_offsets(readings: Sequence[Sequence[float]]) -> list[float]:
    """Return by how many seconds each rank's wall clock is ahead of rank 0's. See [Note: One clock].

    Args:
        readings: for each round, the wall clocks that the ranks read after a barrier, by rank.
    """
    by_rank = zip(*([reading - round_[0] for reading in round_] for round_ in readings), strict=True)
    return [statistics.median(differences) for differences in by_rank]


@contextmanager
def named_units(units: Iterable[tuple[str, nn.Module]]) -> Generator[None]:
    """Inside, each unit's forward and backward are spans in torch's profiler. See [Note: Names of units]."""
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
    """The profiler spans that are open now, the innermost last."""

    def __init__(self) -> None:
        self._forward: list[Any] = []
        self._backward: Any = None

    def forward_begins(self, name: str) -> Any:
        """Return a forward pre-hook, for the module called ``name`` in the trace."""

        def hook(module: nn.Module, args: Any) -> None:
            if not in_backward():
                self._forward.append(_opened(f"forward {name}"))

        return hook

    def forward_ends(self, name: str) -> Any:
        """Return a forward hook for that module; its backward span begins when its output's gradient is computed."""

        def backward_begins(grad: Tensor) -> None:
            if self._backward is None:
                at_end_of_backward(self._end_backward)
            self._end_backward()
            self._backward = _opened(f"backward {name}")

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if in_backward() or not self._forward:
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
        while self._forward:  # a forward that an exception ended has left them open
            self._forward.pop().__exit__(None, None, None)


def _opened(name: str) -> record_function:
    span = record_function(name)
    span.__enter__()
    return span


class RankTrace:
    """Runs torch's profiler for some steps of one rank.

    Args:
        units: names and modules of the units, for the spans.
        device: the rank's device; if it is a CUDA device, its kernels are traced too.
    """

    def __init__(self, units: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._names = named_units(units)

    def start(self) -> None:
        """Start recording."""
        self._profile.__enter__()
        self._names.__enter__()

    def stop(self, path: Path, operations: Iterable[TimedOperation] = ()) -> None:
        """Stop recording, and write this rank's events to ``path``.

        Args:
            path: path of a file for this rank only.
            operations: the collectives that were in flight, with times of `time.perf_counter`, in the order of issue.
        """
        self._names.__exit__(None, None, None)
        self._profile.__exit__(None, None, None)
        self._profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
        path.write_text(json.dumps(with_operations(trace, operations, wall_minus_monotonic_s())), encoding="utf-8")


def with_operations(trace: Trace, operations: Iterable[TimedOperation], wall_minus_monotonic: float) -> Trace:
    """Add a track of ``operations`` to ``trace``, and return it; the trace's time base stays the same."""
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
    """Merge the ranks' traces into one that has a process for each rank, and begins at the first event of any rank.

    Args:
        traces: the ranks' traces, by rank, as torch's profiler writes them.
        offsets_s: the result of `clock_offsets`, by rank; empty: all clocks agree.
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
            if event["ph"] in ("s", "t", "f"):  # arrows: keep the ids of different ranks apart
                moved["id"] = int(event["id"]) + rank * _RANK_STRIDE
            events.append(moved)
    events.sort(key=lambda event: event["ts"])
    start_us = events[0]["ts"] if events else 0.0
    for event in events:
        event["ts"] -= start_us
    base_ns = first_ns + round(start_us * 1e3)
    return {"displayTimeUnit": "ms", "baseTimeNanoseconds": base_ns, "traceEvents": [*names, *events]}


def merge_files(paths: Mapping[int, Path], target: Path, offsets_s: Sequence[float] = ()) -> None:
    """Merge the ranks' files into ``target`` (see `merged`), and remove them."""
    traces = {rank: json.loads(read_text(path, LOG_BYTES)) for rank, path in paths.items()}
    unfinished = target.with_suffix(".tmp")
    unfinished.write_text(json.dumps(merged(traces, offsets_s)), encoding="utf-8")
    unfinished.replace(target)
    for path in paths.values():
        path.unlink()


def _one_after_another(operations: Iterable[TimedOperation]) -> list[TimedOperation]:
    """Move each operation's start to the end of the one before it, if that is later: a track cannot show overlaps."""
    shown: list[TimedOperation] = []
    for operation in operations:
        start = max(operation.issued_s, shown[-1].ended_s) if shown else operation.issued_s
        shown.append(TimedOperation(operation.label, start, max(operation.ended_s, start)))
    return shown


def _metadata(rank: int, name: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": 0, "ts": 0, "args": args}
