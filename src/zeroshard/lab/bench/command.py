"""The verb `zeroshard bench`: checks the settings, runs one bench, and prints and writes its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zeroshard import process
from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.bench.report import Report
from zeroshard.lab.bench.settings import (
    CollectivesBench,
    DeviceBench,
    KernelsBench,
    MemoryBench,
    StepBench,
)
from zeroshard.train.config.sizes import parse_size


def run_bench(settings: Any, json_path: str = "") -> int:
    """Run the bench of ``settings``, print its report and write the file; returns the exit status.

    Args:
        settings: an instance of one of the classes in `zeroshard.lab.bench.settings.BENCHES`.
        json_path: the JSON file for all measurements and the environment; empty: none is written.

    Raises:
        UserError: a setting is invalid or not available on this machine, or a file cannot be written.
    """
    for path in (json_path, getattr(settings, "out", "")):
        _require_writable(path)
    report = _BENCHES[type(settings)](settings)
    print(report.text())
    if json_path:
        report.write(Path(json_path))
    return ExitStatus.OK


def _memory(settings: MemoryBench) -> Report:
    from zeroshard.lab.bench import memory
    from zeroshard.models.presets import model_config
    from zeroshard.zero import STAGES

    for name in settings.models:
        model_config(name)  # its error suggests the nearest preset
    unknown = [stage for stage in settings.stages if stage not in STAGES]
    if unknown:
        raise UserError("stages", f"there is no stage {unknown[0]}", f"choose of {', '.join(map(str, STAGES))}")
    if settings.rank >= settings.nproc:
        raise UserError("rank", f"{settings.rank} is outside a world of {settings.nproc}", "ranks count from 0")
    return memory.run(
        settings.models,
        settings.stages,
        settings.nproc,
        settings.dtype,
        settings.seq_len,
        settings.micro_batch_size,
        _device(settings.device),
        settings.rank,
    )


def _step(settings: StepBench) -> Report:
    from zeroshard.lab.bench import step

    for name in settings.contestants:
        step.check_contestant(name)
        if settings.nproc == 1 and name == "ddp":
            raise UserError("contestants", "ddp needs several ranks", "use plain, or --nproc 2")
    device = _device(settings.device)
    _check_ranks(settings.nproc, device)
    return step.run(
        settings.nproc,
        settings.shapes,
        settings.contestants,
        settings.rounds,
        settings.steps,
        comm=settings.comm,
        device=device,
        num_threads=settings.threads,
    )


def _collectives(settings: CollectivesBench) -> Report:
    from zeroshard.lab.bench import collectives

    sizes = {size: parse_size("sizes", size) for size in settings.sizes}
    device = _device(settings.device)
    for world in settings.worlds:
        if world < 2:
            raise UserError("worlds", f"{world} ranks have nobody to talk to", "give 2 or more")
        _check_ranks(world, device)
    comms = [name for name in settings.comms if device == "cpu" or name == "torch"]
    if len(comms) < len(settings.comms) and "comms" in settings.model_fields_set:
        raise UserError("comms", "rings and shm move CPU tensors", "use torch, or --device cpu")
    return collectives.run(settings.worlds, sizes, settings.dtypes, comms, settings.rounds, device)


def _device_bench(settings: DeviceBench) -> Report:
    from zeroshard.lab.bench import device as bench

    where = _device(settings.device)
    _check_ranks(settings.nproc, where)
    report, calibration = bench.run(settings.nproc, settings.comms, settings.rounds, where, settings.threads)
    bench.write(report, calibration, Path(settings.out))
    report.notes = (*report.notes, f"written: {settings.out}; `zeroshard plan --gpu {settings.out}` reads it")
    return report


def _kernels(settings: KernelsBench) -> Report:
    if not torch.cuda.is_available():
        process.interpret_kernels()
    from zeroshard.kernels.launch import HAS_TRITON
    from zeroshard.lab.bench import kernels
    from zeroshard.lab.bench.kernel_cases import CASES
    from zeroshard.train.config.validate import nearest

    if not HAS_TRITON:
        raise UserError("bench", "Triton is not installed", 'pip install "zeroshard[kernels]"')
    for name in settings.operations:
        if name not in CASES:
            choices = ", ".join(CASES)
            raise UserError("operations", f"{name!r} is unknown", nearest(name, CASES, f"choose of {choices}"))
    return kernels.run(settings.operations or list(CASES), settings.dtypes, settings.rounds)


_BENCHES: dict[type, Any] = {
    MemoryBench: _memory,
    StepBench: _step,
    CollectivesBench: _collectives,
    DeviceBench: _device_bench,
    KernelsBench: _kernels,
}


def _device(wanted: str) -> str:
    """Resolve ``auto`` to ``cpu`` or ``cuda``; raises UserError if CUDA is asked for and not available."""
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device", "there is no CUDA device", "use --device cpu")
    return wanted


def _check_ranks(world: int, device: str) -> None:
    if device == "cuda" and world > torch.cuda.device_count():
        what = f"{world} ranks find {torch.cuda.device_count()} CUDA devices"
        raise UserError("nproc", what, "start at most as many, or use --device cpu")


def _require_writable(path: str) -> None:
    """Raise UserError if the file cannot be written: checked before minutes of measuring. Empty: no file, no check."""
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("ab"):
            pass
    except OSError as error:
        raise UserError(path, f"cannot be written ({error.strerror})", "name another file") from None
