"""Attention that stays inside documents costs a mask, and what each block makes of it: planned as it is held."""

from __future__ import annotations

import pytest
import torch

from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.run_plan import predict
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.dry_run import dry_run
from zeroshard.lab.predict.memory import OPTIMIZER_STATES
from zeroshard.lab.predict.model_trace import tokens_and_targets, trace_language_model
from zeroshard.lab.predict.step import Settings, step_of
from zeroshard.models import build_model
from zeroshard.train.records.plan_contract import Job
from zeroshard.zero import STAGES, MixedPrecision

SEQ_LEN, ROWS = 64, 2
SLACK_BYTES = 2048  # as in test_steps


def _model(name, masked, num_layers=2):
    overrides = {"n_layer": num_layers, "n_head": 2, "n_embd": 16}
    model = build_model(name, vocab_size=61, seq_len=SEQ_LEN, overrides=overrides)
    model.eos_id = 0 if masked else None
    return model


# Six layers are traced with fewer.
@pytest.mark.parametrize(
    ("name", "dtype", "num_layers"), [("gpt2-demo", torch.float32, 6), ("llama-tiny", torch.bfloat16, 2)]
)
def test_the_peak_of_a_step_with_masks_is_planned_to_the_byte(name, dtype, num_layers):
    model = _model(name, True, num_layers)
    precision = MixedPrecision(param_dtype=dtype) if dtype != torch.float32 else MixedPrecision()
    trace = trace_language_model(model, ROWS, SEQ_LEN, precision)
    buffers = buffers_of(model, 3, model.units)
    predicted = step_of(trace, buffers, OPTIMIZER_STATES["AdamW"], Settings(STAGES[2], precision))
    measured = dry_run(
        model,
        tokens_and_targets(SEQ_LEN),
        world_size=3,
        strategy=STAGES[2],
        micro_batch=ROWS,
        units=model.units,
        precision=precision,
        num_steps=2,
    )
    assert abs(predicted.peak.total - measured.peak_bytes) <= SLACK_BYTES


def test_a_run_and_a_plan_reckon_with_masks():
    def peak(stage, masked):
        job = Job(_model("gpt2-demo", masked), STAGES[stage], 0, 3, 3, torch.float32, 2, ROWS, SEQ_LEN, True, "cpu")
        return predict(job).peak_bytes

    # A float mask for each of two blocks, which its attention keeps for backward.
    assert all(peak(stage, True) - peak(stage, False) >= 2 * ROWS * SEQ_LEN * SEQ_LEN * 4 for stage in STAGES)
    given = {"seq_len": SEQ_LEN, "overrides": {"n_layer": 2, "n_head": 2, "n_embd": 16}, "world_size": 2}
    with_mask, without = (
        planner_for("gpt2-demo", document_mask=mask, **given).workload.trace(ROWS).activation_bytes
        for mask in (True, False)
    )
    assert with_mask - without >= 2 * ROWS * SEQ_LEN * SEQ_LEN
