"""Links between nodes that no plan of GPUs in one node passes: the answer says so."""

import json

import pytest

from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig

SIZES = {"name": "gpt2-demo", "n_layer": 2, "n_head": 2, "n_embd": 64}
SLOW = {"model": SIZES, "seq_len": 64, "gpu": "a100-80gb", "network": "100Mbit/s", "micro_batch": 1}


def _answer(**given):
    return answer_plan(PlanConfig.model_validate(SLOW | given)).text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"gpus": 7}, "--network is not used: all 7 GPUs are in one node"),
        ({"gpus": 7, "rails": 4, "oversubscription": 2.0}, "--network and --rails and --oversubscription are not used"),
        ({"gpus": 7, "explain": True}, "--network is not used"),
        ({"gpus": 7, "ask": "remedy"}, "--network is not used"),
        ({"gpus": 7, "gpu": "a100-80gb,h100-80gb"}, "--network is not used"),
        ({"gpus": 1}, "--network is not used: one GPU sends nothing."),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, dict) else "",
)
def test_what_no_plan_passes_is_named(given, words):
    assert _answer(**given).splitlines()[-1].startswith(words)


@pytest.mark.parametrize(
    "given",
    [{"gpus": 9}, {"gpus": 7, "gpus_per_node": 2}, {"gpus": 7, "network": "400Gbit/s"}],
    ids=["two nodes", "small nodes", "as it is unless given"],
)
def test_what_a_plan_passes_is_not(given):
    assert "not used" not in _answer(**given)


def test_json_names_it_too():
    assert json.loads(_answer(gpus=7, json=True))["unused"] == ["network"]
    assert "unused" not in json.loads(_answer(gpus=9, json=True))
