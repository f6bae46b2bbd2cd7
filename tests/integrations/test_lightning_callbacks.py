"""Callbacks and arguments that people give Lightning's Trainer, at stages 1 and 3, beside one process."""

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

SCRIPT = Path(__file__).with_name("lightning_callbacks.py")
ALWAYS = ["ema", "best_checkpoint", "weights_by_name", "module_state"]
ON_REQUEST = ["swa", "finetuning", "finetuning_of_trained", "clip_value", "manual"]
REFUSED = {
    ("ema", 3): "EMAWeightAveraging reads and writes all weights, and stage 3 shards them; use ZeroPlugin(stage=2); "
    "for an average use strategy.engine.ema()",
    ("swa", 3): "StochasticWeightAveraging reads and writes all weights, and stage 3 shards them",
    ("ema_bf16", 1): "EMAWeightAveraging would average weights in the compute dtype, not the fp32 master weights",
    ("pruning", 1): "ModelPruning replaces the parameters, which the engine's buffers hold",
    ("finetuning", 3): "Unfreezes compares frozen weights of the optimizer by value, and stage 3 shards them",
}
REFUSED_ALWAYS = [("ema", 3), ("ema_bf16", 1), ("pruning", 1)]


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        names = [*ALWAYS, "ema_bf16", "pruning"]
        words = [sys.executable, SCRIPT, out, *([] if soaking() else names)]
        done = forked.run(words, capture_output=True, text=True, check=False, timeout=900)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("lightning-callbacks", make) / "results.pt", weights_only=False)


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
