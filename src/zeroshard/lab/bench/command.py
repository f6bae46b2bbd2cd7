"""The verb `zeroshard bench`: checks the settings, runs one bench, and prints and writes its report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from zeroshard import process
from zeroshard.errors import ExitStatus, UserError
from zeroshard.lab.bench.ranks import chosen_device
from zeroshard.lab.bench.report import Report
from zeroshard.lab.bench.settings import (
    CollectivesBench,
    DeviceBench,
    KernelsBench,
    MemoryBench,
    StepBench,
)


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
    report = _measured(settings)
    print(report.text())
    if json_path:
        report.write(Path(json_path))
    return ExitStatus.OK


def _measured(settings: Any) -> Report:
    if isinstance(settings, MemoryBench):
        from zeroshard.lab.bench import memory

        return memory.run(settings)
    if isinstance(settings, StepBench):
        from zeroshard.lab.bench import step

        return step.run(settings)
    if isinstance(settings, CollectivesBench):
        from zeroshard.lab.bench import collectives

        return collectives.run(settings)
    return _kernels(settings) if isinstance(settings, KernelsBench) else _device(settings)


def _device(settings: DeviceBench) -> Report:
    from zeroshard.lab.bench import device as bench

    where = chosen_device(settings.device, settings.nproc)
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
