"""Loops of `transformers.Trainer` and Accelerate at two ranks, stage 3, held against the same loop in one process."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import forked

pytestmark = [
    pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("transformers", "accelerate")
]

SCRIPT = Path(__file__).with_name("loops.py")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def results(made_once):
    def make(out):
        done = forked.run([sys.executable, SCRIPT, out], capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr

    return torch.load(made_once("integrations", make) / "results.pt", weights_only=False)


@pytest.fixture(scope="module")
def plain(results):
    return results["plain"]


@pytest.fixture(scope="module")
def ranks(results):
    return results["ranks"]


def same_numbers(found, expected):
    """Two logs, within the tolerance."""
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    assert sum(map(len, expected)) > 0
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=TOLERANCE)


def same_weights(found, expected):
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, atol=TOLERANCE, rtol=0)


@pytest.mark.redundant
def test_the_trainer_has_the_losses_norms_and_weights_of_one_process(plain, ranks):
    """`same_numbers` and `same_weights` assert it."""
    for rank in ranks:
        same_numbers(rank["trainer"]["log"], plain["trainer"]["log"])
        same_weights(rank["trainer"]["weights"], plain["trainer"]["weights"])


def test_the_trainer_shards_weights_and_optimizer(ranks):
    numel = sum(weight.numel() for weight in ranks[0]["trainer"]["weights"].values())
    for rank in ranks:
        assert rank["memory"]["params"] <= 4 * numel / 2 * 1.02  # padding
        states = rank["memory"]["optimizer"] / rank["memory"]["params"]
        assert 2 <= states < 2.01  # and a counter of steps


def test_a_model_that_was_evaluated_first_trains_as_one_that_was_not(plain, ranks):
    assert 4 < ranks[0]["evaluated first"] < 5
    assert ranks[0]["trainer"]["log"][0]["loss"] == pytest.approx(plain["trainer"]["log"][0]["loss"], abs=TOLERANCE)


def test_what_the_trainer_saves_opens_in_transformers(ranks):
    assert all(rank["opened"] for rank in ranks)
    assert {"config.json", "model.safetensors", "scheduler.pt", "zero"} <= set(ranks[0]["files"])
    assert "optimizer.pt" not in ranks[0]["files"]


@pytest.mark.parametrize("run", ["resumed at 3", "resumed with state away"])
def test_the_trainer_resumes_to_the_bit(ranks, run):
    for rank in ranks:
        first, again = rank["trainer"], rank[run]
        assert again["log"][:-1] == first["log"][:-1]  # the last entry is of the whole run
        assert all(torch.equal(again["weights"][name], weight) for name, weight in first["weights"].items())


def test_the_trainer_keeps_state_on_the_host_if_the_plugin_says_so(ranks):
    for rank in ranks:
        here, away = rank["resumed at 3"]["memory"], rank["resumed with state away"]["memory"]
        assert (away["optimizer"], away["params"]) == (0, 0)
        assert away["host_optimizer"] == here["optimizer"]


def test_the_trainer_resumes_at_another_stage(ranks):
    """`same_numbers` and `same_weights` assert it."""
    same_numbers(ranks[0]["resumed at 1"]["log"], ranks[0]["trainer"]["log"])
    same_weights(ranks[0]["resumed at 1"]["weights"], ranks[0]["trainer"]["weights"])


def test_the_trainer_resumes_what_transformers_saved_in_one_process(plain, ranks):
    """`same_numbers` asserts it."""
    same_numbers(ranks[0]["from plain"], plain["trainer"]["log"])


def test_an_optimizer_of_the_users_is_sharded_and_recomputation_changes_nothing(plain, ranks):
    """`same_numbers` asserts it."""
    same_numbers(ranks[0]["own optimizer"], plain["own optimizer"])


def test_the_best_model_is_loaded_at_the_end(plain, ranks):
    for rank in ranks:
        same_numbers(rank["best"]["log"], plain["best"]["log"])
        same_weights(rank["best"]["weights"], plain["best"]["weights"])
        evaluated = [entry["eval_loss"] for entry in rank["best"]["log"] if "eval_loss" in entry]
        assert rank["best"]["evaluated"] == min(evaluated) < max(evaluated)


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(plain, ranks):
    for rank in ranks:
        assert rank["bf16"]["computes"] == {"torch.bfloat16"}
        assert rank["bf16"]["saved"] == {"torch.float32"}
        for one, other in zip(rank["bf16"]["log"][:2], plain["trainer"]["log"][:2], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], abs=0.01)


def test_accelerates_loop_has_the_losses_and_weights_of_one_process(plain, ranks):
    for rank in ranks:
        found = rank["accelerate"]["first"]
        assert found["losses"] == pytest.approx(plain["accelerate"]["losses"], abs=TOLERANCE)
        same_weights(found["weights"], plain["accelerate"]["weights"])


def test_accelerates_loop_goes_on_from_its_state_at_another_stage(ranks):
    for rank in ranks:
        first, again = rank["accelerate"]["first"], rank["accelerate"]["resumed"]
        assert again["losses"] == pytest.approx(first["losses"][4:], abs=TOLERANCE)
        same_weights(again["weights"], first["weights"])
        away = rank["accelerate"]["resumed with state away"]
        assert away["losses"] == first["losses"][4:]
        assert all(torch.equal(away["weights"][name], weight) for name, weight in first["weights"].items())
        assert "zero" in rank["accelerate"]["written"]
        assert not any("optimizer" in name or "model" in name for name in rank["accelerate"]["written"])


def test_accelerate_clips_values_of_sharded_gradients(ranks):
    assert all(0 < rank["accelerate"]["clipped"] <= 1e-4 * (1 + 1e-6) for rank in ranks)


def test_generate_works_with_sharded_weights_where_ranks_end_at_different_tokens(plain, ranks):
    for index, rank in enumerate(ranks):
        assert rank["accelerate"]["generated"] == plain["generated"][index]
        assert rank["accelerate"]["unsharded"] == plain["generated"][index]
