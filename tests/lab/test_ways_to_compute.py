"""Plans of ways in which blocks compute and weights are kept: autocast, 16-bit weights, compiled."""

import json
import statistics
from pathlib import Path

import pytest
import torch

from zeroshard import Zero
from zeroshard.comm import NullCommunicator
from zeroshard.lab import plan
from zeroshard.lab.planner.show import notes
from zeroshard.lab.predict.actions import Compute
from zeroshard.models import build_model

SMALL = {"n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 256, "vocab_size": 1024, "seq_len": 128}


def _plan(**changes):
    given = {"gpu": "h100-80gb", "micro_batch": 2, "overrides": SMALL, "stage": 3, **changes}
    return plan("llama-tiny", **given)


def _row(**changes):
    return _plan(**changes).rows[0]


def _works(row):
    return [work for action in row.step.last if isinstance(action, Compute) for work in action.work]


def _flops(row, *, attention=False):
    return sum(work.flops for work in _works(row) if work.attention == attention)


def test_autocast_keeps_fp32_and_computes_in_16_bits():
    found = _plan(autocast=True)
    held = sum(found.rows[0].step.before_update.values())
    assert held == pytest.approx(16 * found.workload.num_params, rel=0.01)
    assert found.workload.dtype == "bfloat16"
    assert {work.dtype for work in _works(found.rows[0]) if work.shape} == {"bfloat16"}


@pytest.mark.parametrize("stage", [0, 3])
def test_16_bit_weights_without_masters_are_held_as_the_engine_does(stage):
    model = build_model("llama-tiny", overrides={**SMALL, "n_layer": 2}).bfloat16()
    row = plan(model, world_size=4, gpu="h100-80gb", micro_batch=2, stage=stage).rows[0]
    zero = Zero(model, stage, comm=NullCommunicator(4), units=model.units)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    for _ in range(2):
        optim.zero_grad()
        model(tokens, tokens).backward()
        held = zero.memory_bytes()
        optim.step()
    planned = dict(row.step.before_update)
    # On CUDA a replicated optimizer has whole tensors, and so fewer step counts than on this machine.
    assert abs(planned.pop("optimizer") - held["optimizer"]) < 1000
    assert all(held[name] == num_bytes for name, num_bytes in planned.items())


def test_compiled_code_is_fused_under_autocast_and_beyond_our_kernels():
    plain, compiled = _row(autocast=True), _row(autocast=True, impl="compile")
    assert sum(a.num_bytes for a in _works(compiled)) < 0.8 * sum(a.num_bytes for a in _works(plain))
    assert _row(impl="compile").timing.step_s < _row(impl="kernels").timing.step_s  # norms take in what is around them


def test_a_module_of_others_is_issued_operation_by_operation():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    given = {"world_size": 2, "inputs": lambda rows: (torch.zeros(rows, 8),), "stage": 1, "micro_batch": 1}
    assert plan(model, **given).software.impl == "eager"
    assert plan(model, impl="compile", **given).software.impl == "compile"
    assert _plan().software.impl == "kernels"


def test_whole_tensors_on_many_gpus_are_said_to_be_padding():
    found = _plan(optimizer="muon", world_size=16)
    assert found.rows[0].padding > 2
    assert "Muon keeps tensors whole" in " ".join(notes(found))
    assert not notes(_plan(optimizer="adamw", world_size=64))


def test_gpt2_compiled_whole_is_planned_as_an_h100_took_it():
    """A plain loop under autocast, planned from the rates of the data sheet."""
    results = Path(__file__).parents[2] / "benchmarks" / "gpu" / "results" / "h100-2026-11-28.jsonl"
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    whole = [row for row in rows if row.get("case") == "plain, compile whole" and "step_s" in row]
    given = {"overrides": {"vocab_size": 50304, "seq_len": 1024}, "stage": 0, "micro_batch": 16, "impl": "compile"}
    given |= {"kernels": "reference", "attention": "cudnn", "autocast": True}
    row = plan("gpt2-124m", gpu="h100-80gb", global_batch=whole[0]["tokens"] // 1024, **given).rows[0]
    measured_s = statistics.median(each["step_s"] for each in whole)
    assert row.timing.step_s == pytest.approx(measured_s, rel=0.1)
