"""`plan --ask longest-sequence`: the length fits, the next one does not; levers in order, and what the limit is."""

import json
from itertools import accumulate

import pytest

from lab.small_plans import SMALL, small_gpu
from zeroshard.lab.planner import longest
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.levers import levers
from zeroshard.lab.planner.longest import COARSE, longest_sequence
from zeroshard.lab.planner.planner import planner_for
from zeroshard.settings.validate import validate

LLAMA = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 64, "vocab_size": 512}


def test_the_longest_sequence_fits_with_each_lever_and_one_that_is_longer_does_not():
    planner = planner_for("llama-tiny", world_size=2, gpu=small_gpu(60 * 2**20), overrides=LLAMA)
    found = longest_sequence(planner, 3, 1).rows
    pulled = [*accumulate(levers(planner), lambda job, lever: lever.pull(job), initial=planner)]
    assert [each["levers"][-1:] for each in found] == [
        [],
        ["--model.activation-checkpointing full"],
        ["--model.activation-checkpointing offload"],
        ["--tiles auto"],
        ["--sequence-parallel 2"],
    ]
    assert found[-1]["levers"] == ["--model.activation-checkpointing offload", *(e["levers"][-1] for e in found[3:])]
    lengths = [each["tokens"] for each in found]
    assert lengths == sorted(lengths)
    assert lengths[-1] > 4 * lengths[0]
    for each, there in zip(found, pulled, strict=True):
        unit = COARSE * there.workload.sequence_parallel
        rows = [
            there.on(workload=there.workload.changed(seq_len=each["tokens"] + more)).row(3, 1) for more in (0, unit)
        ]
        assert [row.fits for row in rows] == [True, False]
        assert each["needed_bytes"] == rows[0].needed_bytes == sum(each["parts"].values())
    limits = [each["limit"] for each in found]
    assert limits[0] == "activations of blocks"
    assert limits[-1] == "embedding, hidden states and logits"
    middle = "the feed-forward layer's middle"
    assert [middle in each["parts"] for each in found] == [True, True, True, False, False]


def test_what_is_given_already_is_no_lever():
    given = {"gpus": 1, "gpu": "t4-16gb", "dtype": "float16", "ask": "longest-sequence", "json": True}
    model = {"name": "llama-tiny", "n_layer": 2, "activation_checkpointing": "offload"}
    answer = answer_plan(validate(PlanConfig, {**given, "model": model, "tiles": "auto"}))
    content = json.loads(answer.text)
    assert [each["levers"] for each in content["rows"]] == [[], ["--offload optimizer"]]
    assert content["value"] == content["rows"][0]["tokens"] > 0
    assert answer.status == 0


def test_a_table_of_positions_ends_before_memory_does():
    found = longest_sequence(planner_for("gpt2-demo", gpu=small_gpu(10**9), overrides=SMALL), 0, 1)
    assert found.value == 64
    assert "limited by the model's table of positions" in found.sentence


def test_where_nothing_fits_training_state_is_named():
    found = longest_sequence(planner_for("llama-tiny", gpu=small_gpu(2**20), overrides=LLAMA), 0, 1)
    assert found.value is None
    assert found.sentence.splitlines()[-1].startswith("No sequence fits: training state (")


@pytest.mark.parametrize("border", [1, 63, 64, 65, 40_000, 2**20 - 1])
@pytest.mark.parametrize("flat", [0, 30_000])
def test_a_line_with_a_corner_is_searched_in_few_plans(border, flat):
    asked = []

    def left(num):
        asked.append(num)
        return (border + 0.5 - max(num, min(flat, border))) * 1e4, 1e4 * num

    assert longest._most_multiples(left, 2**20 - 1) == border
    assert len(asked) <= 12
