"""Lightning's Trainer at two ranks, stage 3, held against the same script in one process."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import forked
from soak import soaking

# Found and not imported: the script alone needs it, and each worker that collects tests would take seconds for it.
pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")

SCRIPT = Path(__file__).with_name("lightning_loops.py")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        words = [sys.executable, SCRIPT, out, *(["all"] if soaking() else [])]
        done = forked.run(words, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("lightning", make) / "results.pt", weights_only=False)


def same(found, expected):
    assert found["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
    assert found["val"][: len(expected["val"])] == pytest.approx(expected["val"], abs=TOLERANCE)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=TOLERANCE, rtol=0)


def test_the_trainer_has_the_losses_and_weights_of_one_process(results):
    """With accumulation, clipping by the norm, a schedule, and evaluations between steps and after them."""
    for rank in results["ranks"]:
        same(rank["first"], results["plain"]["first"])


@pytest.mark.soak
def test_the_trainer_validates_after_a_fit(results):
    for rank in results["ranks"]:
        assert rank["validated"][0]["val_loss"] == pytest.approx(results["plain"]["first"]["val"][-1], abs=TOLERANCE)


def test_the_trainer_shards_weights_and_optimizer(results):
    numel = sum(weight.numel() for weight in results["plain"]["first"]["weights"].values())
    for rank in results["ranks"]:
        assert rank["memory"]["params"] <= 4 * numel / 2 * 1.02  # padding
        assert 2 <= rank["memory"]["optimizer"] / rank["memory"]["params"] < 2.02  # and counts of steps


@pytest.mark.soak
@pytest.mark.parametrize("how", ["resumed at 3", "resumed at 1", "from plain"])
def test_the_trainer_resumes_its_shards_at_any_stage_and_a_file_that_one_process_wrote(results, how):
    for rank in results["ranks"]:
        same(rank[how], results["plain"]["resumed"])
        assert rank["files"] == ["meta.ckpt", "zero"]


@pytest.mark.soak
def test_bf16_computes_in_bf16(results):
    for rank in results["ranks"]:
        assert rank["computes"] == {"torch.bfloat16"}
        assert rank["bf16"]["losses"] == pytest.approx(results["plain"]["first"]["losses"], abs=0.01)
        assert {weight.dtype for weight in rank["bf16"]["weights"].values()} == {torch.float32}


@pytest.mark.soak
def test_what_cannot_be_is_one_line(results):
    precision, option = results["ranks"][0]["refused"]
    assert precision == 'precision: 16-true computes in float16 or less, which loses gradients; use "bf16-mixed"'
    assert option == "find_unused_parameters: is an option of DDP, which Zero takes the place of; leave it out"
