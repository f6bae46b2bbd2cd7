"""What `benchmarks/gpu_day.py` measures, piece by piece; each returns what its JSON holds."""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_rank_pieces import strategies, two_ranks
from gpu_setup import (
    DEVICE,
    MAIN_MODEL,
    ON_GPU,
    SEQ_LEN,
    Piece,
    Result,
    SkippedError,
    autocast_step,
    model_of,
    plain_step,
    seconds_in_rounds,
)
from gpu_step_pieces import float8, graphs, overlap
from torch import Tensor

from zeroshard.comm import LocalCommunicator, NullCommunicator
from zeroshard.lab.bench.kernel_cases import CASES, DTYPES
from zeroshard.lab.bench.ranks import synchronise
from zeroshard.lab.bench.report import spread_of
from zeroshard.zero import STAGES, MixedPrecision, Zero

HERE = Path(__file__).parent
TRAINED = {  # sequences of 1,024 tokens in a step
    "gpt2-124m": 16,
    "gpt2-350m": 16,
    "gpt2-774m": 8,
    "gpt2-1.5b": 8,
    "llama-1b": 8,
}
WORLDS = (1, 8, 64)  # as if there were so many ranks
GPUS = (2, 4, 8)
CAPABILITIES = (80, 90, 100)  # A100, H100 and H200, B200

# -------------------------------------------------------------------------------------------- other programs' results


def gpu_tests(out: Path) -> Result:
    """The tests that are marked `gpu`."""
    if importlib.util.find_spec("pytest") is None:
        raise SkippedError("pytest is not installed")
    where = "tests" if ON_GPU else "tests/profiling/test_clock.py"
    words = [
        "-m",
        "gpu",
        "-q",
        "-rfE",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--continue-on-collection-errors",
        where,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=HERE.parent, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1, 5):  # 1: some failed, 5: none was collected
        raise RuntimeError(done.stdout[-4000:] + done.stderr[-2000:])
    lines = done.stdout.splitlines()
    return {"summary": lines[-1], "failed": [line for line in lines if line.startswith(("FAILED", "ERROR"))]}


def _program(out: Path, name: str, *words: str, ok: tuple[int, ...] = (0,)) -> tuple[str, Any]:
    """What a program of this folder printed, and the JSON that it wrote."""
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, "result.json")
        command = [sys.executable, str(HERE / name), *words]
        done = subprocess.run([*command, "--json", str(written)], capture_output=True, text=True, check=False)
        if done.returncode not in ok:
            raise RuntimeError(f"{name} ended with status {done.returncode}: {done.stderr[-4000:]}")
        return done.stdout, json.loads(written.read_text(encoding="utf-8"))


def kernels(out: Path, operation: str) -> Result:
    """One operation's kernels beside eager and compiled PyTorch and Liger, and what of the targets that settles."""
    from zeroshard.lab.bench import kernels as bench

    report = bench.run([operation], list(DTYPES) if ON_GPU else ["float32"], 0)
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch, "k.json")
        report.write(written)
        targets = subprocess.run(
            [sys.executable, str(HERE / "kernel_targets.py"), str(written)], capture_output=True, text=True, check=False
        )
        content = json.loads(written.read_text(encoding="utf-8"))
    told = [line for line in targets.stdout.splitlines() if not line.startswith(("{", "open"))]
    return {"rows": content["rows"], "copy_bytes_per_s": content["copy_bytes_per_s"], "targets": told}


def compiled(out: Path, capabilities: tuple[int, ...]) -> Result:
    """What each kernel takes when it is compiled for a device, whether that is here or not; needs Triton's wheel."""
    program, rows = HERE.parent / "tests" / "kernels" / "compile_for.py", []
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for capability in capabilities:
        with tempfile.TemporaryDirectory() as cache:
            done = subprocess.run(
                [sys.executable, str(program), str(capability)],
                env={**environment, "TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
        if done.returncode:
            raise RuntimeError(done.stderr[-4000:])
        rows += [{"capability": capability, **json.loads(line)} for line in done.stdout.splitlines()]
    return {"rows": rows}


def training(out: Path, model: str) -> Result:
    """Tokens a second and MFU: eager, compiled, our kernels, both, and a plain compiled loop."""
    words = ["--models", model, "--batch", str(TRAINED[model])] if ON_GPU else ["--models", MAIN_MODEL]
    _, found = _program(out, "train_gpu.py", *words)
    return found


def device(out: Path) -> Result:
    """What the device reaches, as `zeroshard plan --gpu FILE` reads it."""
    from zeroshard.lab.bench import device as bench

    report, calibration = bench.run(1, [], 5 if ON_GPU else 1, DEVICE.type, 1)
    bench.write(report, calibration, out / "device.calibration.json")
    return {"rows": report.rows}


# ------------------------------------------------------------------------------------------------------- the engine


def _contestants(rows: int) -> dict[str, Callable[[], Tensor]]:
    """The same steps from the same weights: plain PyTorch, and the engine at each stage in a world of one."""
    found = {}
    for name in ("plain", *STAGES):
        model = model_of()
        if name == "plain":
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        else:
            zero = Zero(model, name, units=model.units, comm=LocalCommunicator())
            optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)
        found[name if name == "plain" else f"zero{name}"] = autocast_step(model, optimizer, rows)
    return found


def tax(out: Path) -> Result:
    """A step under the engine in a world of one, against the same loop without it; rounds in a shuffled order."""
    steps = _contestants(8 if ON_GPU else 1)
    num_rounds, num_steps = (9, 10) if ON_GPU else (2, 1)
    losses = {name: step().item() for name, step in steps.items()}
    times = seconds_in_rounds(steps, num_rounds, num_steps)
    ratios = {
        name: spread_of([a / b for a, b in zip(seen, times["plain"], strict=True)]) for name, seen in times.items()
    }
    return {
        "model": MAIN_MODEL,
        "ratio": ratios,
        "step_s": {name: spread_of(seen) for name, seen in times.items()},
        "first_loss": losses,
    }


WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def busy(out: Path) -> Result:
    """For which share of a step the device computes, and how often the host waits for it or reads from it."""
    from torch.profiler import ProfilerActivity, profile

    found = {}
    for name, step in _contestants(8 if ON_GPU else 1).items():
        for _ in range(3):
            step()
        synchronise(DEVICE)
        num_steps = 5 if ON_GPU else 1
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]) as seen:
            began = time.perf_counter()
            for _ in range(num_steps):
                step()
            queued = time.perf_counter() - began
            synchronise(DEVICE)
            wall = time.perf_counter() - began
        events = seen.events() or []
        spans = [(e.time_range.start, e.time_range.end) for e in events if e.device_type.name == "CUDA"]
        waits = [e.name for e in events if e.name in WAITS] + [e.name for e in events if "Memcpy DtoH" in e.name]
        found[name] = {
            "wall_s": wall / num_steps,
            "queued_s": queued / num_steps,
            "busy_share": _union_us(spans) / 1e6 / wall if spans else None,
            "num_kernels": len(spans) / num_steps,
            "num_host_waits": len(waits) / num_steps,
        }
    return {"model": MAIN_MODEL, "contestants": found}


def _union_us(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def memory(out: Path, world: int) -> Result:
    """The allocator's peak in a step of one rank of ``world``, beside what is planned from shapes."""
    from zeroshard.lab.predict.buffers import buffers_of
    from zeroshard.lab.predict.memory import OPTIMIZER_STATES
    from zeroshard.lab.predict.model_trace import trace_language_model
    from zeroshard.lab.predict.step import Settings, step_of
    from zeroshard.profiling.memory import AllocationRecorder

    precision, rows = MixedPrecision(param_dtype=torch.bfloat16), 8 if ON_GPU else 1
    found = []
    for stage in STAGES:
        model = model_of()
        trace = trace_language_model(model, rows, SEQ_LEN, precision, device_type=DEVICE.type)
        buffers = buffers_of(model, world, model.units)
        planned = step_of(trace, buffers, OPTIMIZER_STATES["AdamW"], Settings(STAGES[stage], precision)).peak.total
        zero = Zero(model, stage, units=model.units, comm=NullCommunicator(world), precision=precision)
        optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)
        step = plain_step(model, optimizer, rows)

        for _ in range(2):
            step()
        if ON_GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            step()
            torch.cuda.synchronize()
            measured, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        else:
            recorder = AllocationRecorder(zero.holdings).follow(model, optimizer)
            with recorder:
                step()
            recorder.remove()
            measured = reserved = recorder.peak.num_bytes
        found.append({"stage": stage, "planned": planned, "measured": measured, "reserved": reserved})
        del model, zero, optimizer, step, trace, buffers
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    return {"model": MAIN_MODEL, "world": world, "rows": found}


def saving(out: Path) -> Result:
    """For how long a save in the background holds training up, and what a step beside it takes."""
    from zeroshard import checkpoint

    model = model_of()
    zero = Zero(model, 2, units=model.units, comm=LocalCommunicator())
    optimizer = zero.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)
    step = autocast_step(model, optimizer, 8 if ON_GPU else 1)
    found: dict[str, list[float]] = {"step_s": [], "stall_s": [], "beside_s": [], "total_s": [], "load_s": []}

    def timed(key: str, work: Callable[[], object]) -> None:
        synchronise(DEVICE)
        began = time.perf_counter()
        work()
        synchronise(DEVICE)
        found[key].append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory(dir=out) as folder:
        saver = checkpoint.BackgroundSaver(zero.comm, background=True, in_place=True)
        optimizer.register_step_pre_hook(lambda *_: saver.settle())  # an update changes what the writer reads in place
        for number in range(4 if ON_GPU else 2):
            step()
            timed("step_s", step)
            path = Path(folder, f"step-{number}")
            began = time.perf_counter()
            timed("stall_s", lambda path=path, number=number: saver.start(path, zero, step=number))
            timed("beside_s", step)
            saved = saver.wait()
            if saved is None or saved.error:
                raise RuntimeError(f"the save failed: {saved}")
            found["total_s"].append(time.perf_counter() - began)
            timed("load_s", lambda path=path: checkpoint.load(path, zero))
        saver.close()
        num_bytes = sum(file.stat().st_size for file in path.iterdir())
    return {"model": MAIN_MODEL, "num_bytes": num_bytes, **{key: spread_of(seen[1:]) for key, seen in found.items()}}


PIECES: dict[str, Piece] = {
    "tests": Piece("pytest -m gpu", 8, gpu_tests),
    "two-ranks": Piece("two ranks on one GPU over gloo: the same bits at each stage", 3, two_ranks),
    "tax": Piece("a step under the engine in a world of one, against the same loop without it", 3, tax),
    "compiled": Piece(
        "registers, spills and shared memory of each kernel", 4, compiled, {"capabilities": CAPABILITIES}
    ),
    "overlap": Piece(
        "how much of collectives a step hides, by copies in their place; traces", 3, overlap, {"world": 8}
    ),
    "graphs": Piece("a step as one CUDA graph", 4, graphs),
    "fp8": Piece("products in 8 bits beside bf16", 4, float8),
    "busy": Piece("share of a step in which the device computes; host waits", 3, busy),
    **{f"memory-{n}": Piece(f"peak beside the plan, a rank of {n}", 3, memory, {"world": n}) for n in WORLDS},
    **{
        f"train-{model}": Piece(f"tokens/s and MFU of {model}", 8, training, {"model": model})
        for model in (TRAINED if ON_GPU else [MAIN_MODEL])
    },
    **{f"kernels-{name}": Piece(f"{name} beside PyTorch and Liger", 6, kernels, {"operation": name}) for name in CASES},
    "device": Piece("what the device reaches, for `plan --gpu FILE`", 3, device),
    "saving": Piece("what a checkpoint costs a step", 4, saving),
    **{f"strategies-{n}": Piece(f"every strategy on {n} GPUs over NCCL", 9, strategies, {"world": n}) for n in GPUS},
}
