"""Where a step's time goes: kernels by kind, and the host that queues them."""

from __future__ import annotations

import collections
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import qwen_shapes
import rows
from overlap import trace_of
from torch import Tensor

Step = Callable[[int], Tensor]
# Kernels by a part of their names, the first that matches.
KINDS = (
    ("attention", ("sdpa", "flash", "fmha", "attention", "dot_do_o")),
    ("products", ("nvjet", "gemm", "cutlass", "splitK", "cublas")),
    ("compiled", ("triton_",)),
    ("copies", ("Memcpy", "Memset", "CatArray", "copy")),
    ("sums", ("reduce_kernel",)),
    ("optimizer and norm", ("multi_tensor", "FusedAdam")),
    ("torch's elementwise", ("elementwise",)),
)  # fmt: skip


def kind_of(name: str) -> str:
    """The kind of a kernel by its name; ``others`` are also our own Triton kernels, whose names start with ``_``."""
    return next((kind for kind, parts in KINDS if any(part in name for part in parts)), "others")


def steps_broken_down(budget: rows.Budget, say: rows.Say) -> None:
    """Say what `broken_down` finds for GPT-2, compiled and eager, and for a transformers model with compiled blocks."""
    micro = 2 if rows.TOY else 16
    config = {**qwen_shapes.QWEN_ALIKE, **(qwen_shapes.QWEN_TOY if rows.TOY else qwen_shapes.QWEN["qwen2.5-0.5b"])}
    cases: dict[str, Callable[[], Step]] = {
        "zero1, compile": lambda: rows._contestant("zero1", "compile", micro),
        "zero1, eager": lambda: rows._contestant("zero1", "eager", micro),
        "qwen2.5-0.5b": lambda: rows._qwen_step(config, micro)[0],
    }
    for index, (case, build) in enumerate(cases.items()):
        if budget.spent():
            say(case=case, left_out="no time was left")
            continue
        with rows.losing_itself_alone(say, case):
            trace = say.out.with_name(f"{say.out.stem}-breakdown-{index}.json.gz")
            say(case=case, **broken_down(build(), micro, trace))
        rows.cleared()


def broken_down(step: Step, micro: int, trace: Path) -> dict[str, Any]:
    """Seconds of steps of one micro-batch and of four, with the host's part; and kernels of a trace of one."""
    step(1)
    taken: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
    for num_micro in (1, 4, 1, 4, 1, 4):
        rows.synchronise()
        began = time.perf_counter()
        step(num_micro)
        queued_s = time.perf_counter() - began
        rows.synchronise()
        taken[num_micro].append((time.perf_counter() - began, queued_s))
    found = {f"{what}_{num}_s": statistics.median(pair[index] for pair in pairs)
             for num, pairs in taken.items() for index, what in enumerate(("step", "queued"))}  # fmt: skip
    under_load = {} if rows.TOY else _clocks(step)
    return {**found, **under_load, "tokens": micro * rows.SEQ_LEN, **kernels_of(trace_of(lambda: step(1), trace))}


def kernels_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Number and milliseconds of a trace's kernels by kind, and of the thirty that take longest by name."""
    by_kind: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    by_name: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            for table, key in ((by_kind, kind_of(event["name"])), (by_name, event["name"][:90])):
                table[key][0] += 1
                table[key][1] = round(table[key][1] + event["dur"] / 1e3, 4)
    longest = sorted(by_name.items(), key=lambda item: -item[1][1])[:30]
    return {"kernels_ms": sum(ms for _, ms in by_kind.values()), "by_kind": dict(by_kind), "longest": dict(longest)}


def _clocks(step: Step) -> dict[str, str]:
    """What nvidia-smi says of clock and power while queued steps run."""
    step(16)  # the host returns before the device is done
    asked = "clocks.sm,clocks.max.sm,power.draw,power.limit,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
        told = (done.stdout or done.stderr).strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        told = str(error)
    rows.synchronise()
    return {"under_load": f"{asked}: {told}"}
