"""Lightning's Trainer at stages 1 and 3 on two ranks, held against the same script in one process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import forked
from same_results import same
from soak import soaking

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

SCRIPT = Path(__file__).with_name("lightning_runs.py")
ALWAYS = ["fit", "ema", "best_checkpoint", "weights_by_name", "module_state"]
ON_REQUEST = ["resumed", "finetuning", "finetuning_of_trained", "manual"]
REFUSED = {
    ("ema", 3): "EMAWeightAveraging reads and writes all weights, and stage 3 shards them; use ZeroPlugin(stage=2); "
    "for an average use strategy.engine.ema()",
    ("ema_bf16", 1): "EMAWeightAveraging would average weights in the compute dtype, not the fp32 master weights",
    ("pruning", 1): "ModelPruning replaces the parameters, which the engine's buffers hold",
    ("finetuning", 3): "Unfreezes compares frozen weights of the optimizer by value, and stage 3 shards them",
}
REFUSED_ALWAYS = [("ema", 3), ("ema_bf16", 1), ("pruning", 1)]


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        names = [*ALWAYS, "memory", "ema_bf16", "pruning"]
        words = [sys.executable, SCRIPT, out, *([] if soaking() else names)]
        done = forked.run(words, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("lightning", make) / "results.pt", weights_only=False)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.soak) for name in ON_REQUEST)])
def test_the_trainer_does_what_it_does_in_one_process(results, name, stage):
    expected = results["plain"][name]
    assert not isinstance(expected, str), expected
    for rank in results[stage]:
        if (name, stage) not in REFUSED:
            same(rank[name], expected)


@pytest.mark.parametrize(
    ("name", "stage"),
    [each if each in REFUSED_ALWAYS else pytest.param(*each, marks=pytest.mark.soak) for each in REFUSED],
)
def test_what_cannot_be_is_one_line_before_the_first_step(results, name, stage):
    for rank in results[stage]:
        assert rank[name].startswith(f"UserError: callbacks: {REFUSED[name, stage]}")
        assert "\n" not in rank[name]


def test_the_trainer_shards_weights_and_optimizer(results):
    numel = sum(weight.numel() for weight in results["plain"]["fit"]["weights"].values())
    for rank in results[3]:
        assert rank["memory"]["params"] <= 4 * numel / 2 * 1.02  # padding
        assert 2 <= rank["memory"]["optimizer"] / rank["memory"]["params"] < 2.02  # and counts of steps


@pytest.mark.soak
@pytest.mark.parametrize("stage", [1, 3])
def test_bf16_computes_in_bf16_and_float16_is_refused(results, stage):
    for rank in results[stage]:
        assert rank["bf16"]["computes"] == {torch.bfloat16}
        assert rank["bf16"]["kept"] == {torch.float32}
        assert rank["bf16"]["losses"] == pytest.approx(results["plain"]["bf16"]["losses"], abs=0.01)
        line = 'precision: 16-true computes in float16 or less, which loses gradients; use "bf16-mixed"'
        assert rank["refused_precision"] == f"UserError: {line}"


def test_an_option_of_ddp_is_refused():
    from zeroshard.errors import UserError
    from zeroshard.integrations.lightning import ZeroStrategy

    with pytest.raises(UserError, match=r"^find_unused_parameters: is an option of DDP, .*; leave it out$"):
        ZeroStrategy(find_unused_parameters=True)
