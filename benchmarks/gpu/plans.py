"""What the planner says of the rows that quarter.py measured; needs no GPU, so it costs none of its seconds."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]
STEPS: dict[str, Any] = {"zero1, eager": "eager", "zero1, compile": "compile"}


@functools.cache
def _traced(name: str, checkpointing: str, batch: int, device_type: str) -> tuple[Any, Any]:
    import rows
    import torch

    from zeroshard.lab.predict.model_trace import trace_language_model

    with torch.device("meta"):
        model = rows.built(name, activation_checkpointing=checkpointing)
    return model, trace_language_model(model, batch, rows.SEQ_LEN, rows.BF16, device_type=device_type)


@functools.cache  # each was measured in several rounds
def _peak_bytes(name: str, checkpointing: str, stage: int, world: int, batch: int, device_type: str) -> int:
    """The planned peak of the step that rows.py takes: without clipping, by torch's AdamW."""
    import rows

    from zeroshard.lab.predict.buffers import buffers_of
    from zeroshard.lab.predict.memory import OPTIMIZER_STATES
    from zeroshard.lab.predict.step import Settings, step_of
    from zeroshard.zero import STAGES

    model, trace = _traced(name, checkpointing, batch, device_type)
    settings = Settings(STAGES[stage], rows.BF16, device_type=device_type, clips=False)
    buffers = buffers_of(model, world, model.units)
    return step_of(trace, buffers, settings, OPTIMIZER_STATES["AdamW"]).peak.total


def planned(records: list[Record]) -> Iterator[Record]:
    """A record for each that has one: ``planned_bytes`` of peaks, ``planned_s`` of steps.

    Without a record of the row ``device`` there is no rate to plan times with, and peaks are planned for an H100.
    """
    toy = any(record.get("toy") for record in records)
    os.environ["QUARTER_REHEARSES" if toy else "QUARTER_PLANS"] = "1"  # rows.py then has the sizes that were measured
    import qwen_shapes
    import rows

    from zeroshard.lab.planner.planner import planner_for

    calibration = next((record["calibration"] for record in reversed(records) if "calibration" in record), None)
    model, changes = ("gpt2-demo", rows.TINY) if toy else ("gpt2-124m", {})
    changes = {**changes, "vocab_size": rows.VOCAB, "seq_len": rows.SEQ_LEN}
    with tempfile.TemporaryDirectory() as folder:
        gpu = "h100-80gb"
        if calibration is not None:
            gpu = str(Path(folder, "device.json"))
            Path(gpu).write_text(json.dumps(calibration))
        common: dict[str, Any] = {"gpu": gpu, "seq_len": rows.SEQ_LEN, "dtype": "bfloat16"}
        for record in records:
            if record["row"] == "memory" and "peak_bytes" in record:
                case = {key: record[key] for key in ("model", "checkpointing", "stage", "world", "rows")}
                num_bytes = _peak_bytes(*case.values(), "cpu" if toy else "cuda")
                yield {"row": record["row"], **case, "planned_bytes": num_bytes}
            elif calibration and record["row"] == "gpt2-124m" and record.get("round") == 0 and record["case"] in STEPS:
                batch = record["tokens"] // rows.SEQ_LEN
                planner = planner_for(model, global_batch=batch, kernels="reference", impl=STEPS[record["case"]],
                                      loss="plain", overrides=changes, **common)  # fmt: skip
                step_s = planner.row(1, record["micro_batch"]).timing.step_s
                yield {"row": record["row"], "case": record["case"], "planned_s": step_s}
            elif record["row"] == "long sequences" and "peak_bytes" in record and not record.get("round"):
                from long_sequences import planned as of_tokens

                row = of_tokens(record["tokens"], gpu)
                time = {"planned_s": row.timing.step_s} if calibration else {}
                num_bytes = row.step.peak.total + row.process.allocated
                yield {"row": record["row"], "case": record["case"], "planned_bytes": num_bytes, **time}
            elif calibration and record["row"] == "qwen" and record.get("round") == 0:
                config = {
                    **qwen_shapes.QWEN_ALIKE,
                    **(qwen_shapes.QWEN_TOY if toy else qwen_shapes.QWEN[record["case"]]),
                }
                Path(folder, "config.json").write_text(json.dumps(config))
                planner = planner_for(f"hf:{folder}", global_batch=record["tokens"] // rows.SEQ_LEN, impl="compile",
                                      overrides={"from_config": True}, **common)  # fmt: skip
                step_s = planner.row(1, record["micro_batch"]).timing.step_s
                yield {"row": record["row"], "case": record["case"], "planned_s": step_s}
