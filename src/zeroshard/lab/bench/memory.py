"""Bytes on a rank at three points, component by component, compared with the formula of `zeroshard.lab.predict.memory`.

One process takes two steps as one rank of a world of any size (`zeroshard.lab.predict.dry_run`). The measured bytes are
those of the engine's storages (`zeroshard.profiling.memory`); the predicted bytes follow from shapes alone. If the two
are not equal to the byte, the line is marked. On the CPU the peak is found by following every operation, on CUDA by
asking the allocator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.errors import UserError
from zeroshard.lab.bench.ranks import chosen_device
from zeroshard.lab.bench.report import Column, Report, Row
from zeroshard.lab.bench.settings import MemoryBench
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.dry_run import dry_run
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.lab.predict.model_trace import tokens_and_targets
from zeroshard.lab.predict.workload import DTYPES
from zeroshard.models import LanguageModel, build_model
from zeroshard.models.presets import model_config
from zeroshard.profiling.memory import POINTS, STATE
from zeroshard.zero import STAGES, MixedPrecision

MIB = 2**20


def run(settings: MemoryBench) -> Report:
    """Measure each model at each stage.

    Raises:
        UserError: there is no such model, stage or rank.
    """
    for name in settings.models:
        model_config(name)  # its error suggests the nearest preset
    unknown = [stage for stage in settings.stages if stage not in STAGES]
    if unknown:
        raise UserError("stages", f"there is no stage {unknown[0]}", f"choose of {', '.join(map(str, STAGES))}")
    if settings.rank >= settings.nproc:
        raise UserError("rank", f"{settings.rank} is outside a world of {settings.nproc}", "ranks count from 0")
    device = torch.device(chosen_device(settings.device))
    rows = [
        row for name in settings.models for stage in settings.stages for row in _rows(name, stage, settings, device)
    ]
    columns = [Column(name, name) for name in ("model", "stage", "point")]
    columns += [Column(category, category, _beside) for category in (*STATE[:4], "all")]
    columns.append(Column("note", ""))
    facts = {name: getattr(settings, name) for name in ("rank", "dtype", "seq_len", "micro_batch_size")}
    points = [row for row in rows if row["point"] in POINTS]
    exact = sum(not row["note"] for row in points)
    note = f"MiB; {exact} of {len(points)} points as predicted, to the byte"
    return Report("memory", rows, columns, {"world": settings.nproc, **facts}, [note])


def predicted_points(
    model: LanguageModel, stage: int, settings: MemoryBench, device_type: str
) -> dict[str, dict[str, int]]:
    """Predicted bytes by point and category, from shapes alone; ``model`` may be on the meta device."""
    buffers, precision = buffers_of(model, settings.nproc, model.units), precision_of(settings)
    args = (buffers, STAGES[stage], settings.rank, OPTIMIZER_STATES["AdamW"], precision)
    full = state_bytes(*args, device_type=device_type)
    before = {**full, "optimizer": 0}
    return {"initialised": {**before, "grads": 0}, "before_step": before, "after_step": full}


def precision_of(settings: MemoryBench) -> MixedPrecision | None:
    """The mixed-precision policy that the trainer uses for the compute dtype; None for fp32."""
    return None if settings.dtype == "float32" else MixedPrecision(param_dtype=DTYPES[settings.dtype])


def _rows(name: str, stage: int, settings: MemoryBench, device: torch.device) -> list[Row]:
    with torch.device("meta"):
        model = build_model(name)
    predicted = predicted_points(model, stage, settings, device.type)
    measured = dry_run(
        model,
        tokens_and_targets(min(settings.seq_len, model.config.seq_len)),
        world_size=settings.nproc,
        rank=settings.rank,
        strategy=STAGES[stage],
        micro_batch=settings.micro_batch_size,
        units=model.units,
        precision=precision_of(settings),
        device=device,
        num_steps=2,
        record=device.type != "cuda",
    )
    points = dict(zip(POINTS, (measured.start, *measured.updates[0]), strict=True))
    points = {point: {category: n for category, n in held.items() if n} for point, held in points.items()}
    peak, peak_bytes = measured.peak_by_category, measured.peak_bytes
    rows: list[Row] = []
    for point in POINTS:
        row: Row = {"model": name, "stage": stage, "point": point}
        for category in predicted[point]:
            row[category] = {"predicted": predicted[point][category], "measured": points[point].get(category, 0)}
        row["all"] = {"predicted": sum(predicted[point].values()), "measured": sum(points[point].values())}
        wanted = {category: num_bytes for category, num_bytes in predicted[point].items() if num_bytes}
        rows.append({**row, "note": "" if wanted == points[point] else "differs"})
    more = ", ".join(
        f"{category} {num_bytes / MIB:.1f}" for category, num_bytes in peak.items() if category not in STATE
    )
    held = {category: {"measured": peak[category]} for category in STATE if category in peak}
    rows.append(
        {
            "model": name,
            "stage": stage,
            "point": "peak",
            **held,
            "all": {"measured": peak_bytes},
            "note": f"MiB: {more}" if more else "",
            "by_category": peak,
        }
    )
    return rows


def _beside(value: Mapping[str, Any]) -> str:
    """Format the measured MiB: ``12.30``, or with the prediction if that differs: ``12.30 (11.00)``."""
    measured, predicted = value["measured"], value.get("predicted")
    text = f"{measured / MIB:.2f}"
    return text if predicted is None or predicted == measured else f"{text} ({predicted / MIB:.2f})"
