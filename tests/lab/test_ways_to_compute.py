"""Plans of ways in which blocks compute and weights are kept: autocast, 16-bit weights, compiled."""

import json
import shlex
import statistics
from pathlib import Path

import pytest
import torch

from zeroshard import Zero
from zeroshard.cli.flags import flags_of, read_flags
from zeroshard.comm import NullCommunicator
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.show import notes
from zeroshard.lab.predict.actions import Compute
from zeroshard.models import build_model
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.setup import compiled
from zeroshard.train.setup.compiled import why_off

SMALL = {"n_layer": 4, "n_head": 8, "n_kv_head": 4, "n_embd": 256, "vocab_size": 1024, "seq_len": 128}


def _plan(**changes):
    given = {"gpu": "h100-80gb", "micro_batch": 2, "overrides": SMALL, "stage": 3, **changes}
    return plan("llama-tiny", **given)


def _row(**changes):
    return _plan(**changes).rows[0]


def _works(row):
    return [work for action in row.step.last if isinstance(action, Compute) for work in action.work]


@pytest.mark.redundant
def test_autocast_keeps_fp32_and_computes_in_16_bits():
    found = _plan(autocast=True)
    held = sum(found.rows[0].step.before_update.values())
    assert held == pytest.approx(16 * found.workload.num_params, rel=0.01)
    assert found.workload.dtype == "bfloat16"
    assert {work.dtype for work in _works(found.rows[0]) if work.shape} == {"bfloat16"}


@pytest.mark.redundant
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


@pytest.mark.redundant
def test_compiled_code_is_fused_under_autocast_and_beyond_our_kernels():
    plain, compiled = _row(autocast=True), _row(autocast=True, impl="compile")
    assert sum(a.num_bytes for a in _works(compiled)) < 0.8 * sum(a.num_bytes for a in _works(plain))
    assert _row(impl="compile").timing.step_s < _row(impl="kernels").timing.step_s  # norms take in what is around them


@pytest.mark.redundant
def test_a_module_of_others_is_issued_operation_by_operation():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    given = {"world_size": 2, "inputs": lambda rows: (torch.zeros(rows, 8),), "stage": 1, "micro_batch": 1}
    assert plan(model, **given).software.impl == "eager"
    assert plan(model, impl="compile", **given).software.impl == "compile"
    with torch.device("meta"):
        assert plan(build_model("llama-tiny", overrides=SMALL), gpu="h100-80gb").software.impl == "kernels"


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("", "compiled in one graph, as a run is by default; attention by cudnn"),
        ("--gpus 2", "compiled in pieces, as a run is by default; attention by cudnn"),
        ("--gpus 2 --reproducible 2",
         "not compiled, with fused kernels, as a run with reproducible is by default; attention by flash-2"),
        ("--tiles auto --model.activation-checkpointing full",
         "not compiled, with fused kernels, as a run with tiles is by default; attention by cudnn"),
        ("--gpus 2 --sequence-parallel 2 --model.activation-checkpointing selective",
         "not compiled, with fused kernels, as a run with sequence_parallel is by default; attention by cudnn"),
        ("--impl kernels", "not compiled, with fused kernels; attention by cudnn"),
        ("--impl eager --attention flash-2", "not compiled, by torch's operations; attention by flash-2"),
        ("--impl compile --reproducible 2", "compiled in pieces; attention by flash-2"),
        ("--autocast --gpu a100-80gb", "not compiled, by torch's operations; attention by flash-2"),
        ("--gpu b200-180gb", "compiled in one graph, as a run is by default; attention by cudnn"),
        ("--dtype float32 --gpu rtx-4090", "compiled in one graph, as a run is by default"),
        ("--document-mask", "compiled in one graph, as a run is by default; attention by flash-2"),
    ],
)  # fmt: skip
def test_a_plan_computes_as_its_run_does_by_default_and_says_so(flags, line, monkeypatch):
    """The command that it prints, on a GPU with a compiler, compiles what was planned as compiled, and nothing else."""
    monkeypatch.setattr(compiled, "missing_compiler", lambda device: None)
    words = f"--model gpt2-demo --model.n-layer 2 --seq-len 128 --micro-batch 2 --stage 1 {flags}"
    given = read_flags(shlex.split(words), flags_of(PlanConfig))
    assert answer_plan(validate(PlanConfig, given)).text.splitlines()[2] == f"the model {line}"
    content = json.loads(answer_plan(validate(PlanConfig, {**given, "json": True})).text)
    assert (content["impl"] == "compile") == line.startswith("compiled")
    if content["command"] is None:
        assert "--autocast" in flags
        return
    run = validate(TrainConfig, read_flags(shlex.split(content["command"])[2:], flags_of(TrainConfig)))
    compiles = run.compile == "on" or (run.compile == "auto" and not why_off(run, torch.device("cuda")))
    assert compiles == (content["impl"] == "compile")
    assert (run.kernels == "reference") == (content["impl"] == "eager")


def test_reproducible_rows_of_documents_have_the_mask_that_their_run_has():
    """Flex attention, by blocks, is not deterministic: the run of such a plan gives every pair of tokens its bit."""
    sizes = {**SMALL, "seq_len": 512, "n_layer": 2}

    def kept(**changes):
        found = _row(overrides=sizes, dtype="bfloat16", **changes).step.at_loss
        return found.by_category["activations"]

    plain, by_blocks = (kept(impl="kernels", document_mask=mask) for mask in (False, True))
    assert by_blocks - plain < 2 * 512 * 512 / 4
    assert kept(reproducible=1, document_mask=True) - kept(reproducible=1) >= 2 * 512 * 512 * 2  # in 16 bits


def test_whole_tensors_on_many_gpus_are_said_to_be_padding():
    found = _plan(optimizer="muon", world_size=16)
    assert found.rows[0].padding > 2
    assert "Muon keeps tensors whole" in " ".join(notes(found))
    assert not notes(_plan(optimizer="adamw", world_size=64))


@pytest.mark.redundant
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
