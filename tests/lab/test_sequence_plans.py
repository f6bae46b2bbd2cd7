"""Plans of ranks that share sequences: a part of the activations, all-to-alls to the byte, and commands that run."""

import json
import shlex
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest

from dry_run import compared
from zeroshard.host.errors import UserError
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.predict.model_trace import trace_language_model
from zeroshard.models import LlamaConfig
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.zero import MixedPrecision

HEADS = {"n_head": 4, "n_kv_head": 2, "n_embd": 64}
TINY = {"name": "llama-tiny", "n_layer": 3, **HEADS}
CONFIG = LlamaConfig(vocab_size=61, seq_len=64, n_layer=7, n_head=4, n_kv_head=2, n_embd=32, ffn_hidden=48)


def exchanges(trace):
    return [(span.event.num_bytes, span.event.num_ranks) for span in trace.spans if span.event.name == "exchange"]


@pytest.mark.redundant
@pytest.mark.parametrize("how", ["none", "full", "every:2"])
def test_a_block_exchanges_twice_in_forward_and_in_backward_and_again_where_it_is_recomputed(how):
    model = replace(CONFIG, activation_checkpointing=how).build()
    found = exchanges(trace_language_model(model, 3, 64, MixedPrecision(), sequence_parallel=4))
    tokens, width, width_of_kv = 3 * 16, 32, 32  # its 2 heads of keys are copied for 4 ranks
    recomputed = {"none": 0, "full": 7, "every:2": 4}[how]
    inward, outward = (tokens * 4 * numbers for numbers in (width + 2 * width_of_kv, width))
    times = 2 * 7 + recomputed
    assert sorted(found) == sorted([(inward, 4)] * times + [(outward, 4)] * times)


@pytest.mark.redundant
def test_a_rank_keeps_a_part_of_the_activations():
    config = replace(CONFIG, seq_len=4096, n_kv_head=4)
    kept = []
    for size in (1, 2, 4):
        trace = trace_language_model(config.build(), 1, 4096, MixedPrecision(), sequence_parallel=size)
        kept.append(max(accumulate(span.kept for span in trace.spans)))
    assert [each / kept[0] for each in kept] == pytest.approx([1, 1 / 2, 1 / 4], rel=1e-3)


@pytest.mark.redundant
def test_all_to_alls_are_within_a_node_and_attention_waits_for_them():
    of = partial(
        plan, "llama-tiny", overrides=HEADS, world_size=4, stage=3, micro_batch=1, gpu="h100-80gb", seq_len=1024
    )
    whole, shared = (of(sequence_parallel=size).rows[0] for size in (1, 4))
    assert shared.step.tokens * 4 == whole.step.tokens
    sent = [each for each in shared.by_link if each.op == "all_to_all"]
    assert [(each.num_ranks, each.link) for each in sent] == [(4, "within a node")]
    assert shared.timing.exposed_s > whole.timing.exposed_s, "attention waits for each of them"
    assert not [each for each in whole.by_link if each.op == "all_to_all"]


def test_ranks_of_two_nodes_may_share_a_sequence():
    rows = plan(
        "llama-tiny",
        overrides=HEADS,
        world_size=4,
        gpus_per_node=2,
        stage=3,
        micro_batch=1,
        seq_len=1024,
        sequence_parallel=4,
    )
    (sent,) = [each for each in rows.rows[0].by_link if each.op == "all_to_all"]
    assert sent.link == "between nodes"


def test_a_global_batch_is_shared_out_to_groups():
    planner = planner_for("llama-tiny", overrides=HEADS, world_size=8, sequence_parallel=4, global_batch=12)
    assert [planner.num_micro(size) for size in (1, 2, 3, 4)] == [6, 3, 2, 0]


def test_the_command_of_a_plan_shares_sequences_too():
    config = validate(PlanConfig, {"model": TINY, "gpus": 4, "sequence_parallel": 2, "seq_len": 64, "json": True})
    content = json.loads(answer_plan(config).text)
    assert content["sequence_parallel"] == 2
    words = shlex.split(content["command"])
    assert words[words.index("--sequence-parallel") + 1] == "2"
    text = answer_plan(config.model_copy(update={"json": False})).text
    assert "sequences of 64, each shared by 2 GPUs" in text


@pytest.mark.redundant
def test_a_dry_run_sends_what_is_planned():
    given = {"model": {**TINY, "activation_checkpointing": "full"}, "gpus": 4, "sequence_parallel": 2, "seq_len": 64}
    given |= {"stage": "3", "micro_batch": 2, "dtype": "float32"}
    found = compared(validate(PlanConfig, given))
    for name in ("messages", "message bytes", "params", "grads", "optimizer"):
        assert found[name]["predicted"] == found[name]["measured"], name
    assert found["messages"]["predicted"] > TINY["n_layer"] * 6
    assert found["peak"]["predicted"] == pytest.approx(found["peak"]["measured"], rel=0.03)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"sequence_parallel": 3}, r"sequence_parallel: groups of 3 ranks .* a world of 4; choose one of 1, 2, 4"),
        (
            {"sequence_parallel": 4, "model": {**TINY, "n_head": 2, "n_kv_head": 1}},
            r"4 ranks do not divide 2 query heads",
        ),
        ({"sequence_parallel": 4, "seq_len": 62}, r"seq_len: 62 tokens cannot be cut into 4 equal parts"),
        (
            {"sequence_parallel": 2, "ask": "fewest-gpus"},
            r"sequence_parallel: fewest-gpus looks at other numbers of GPUs",
        ),
        ({"sequence_parallel": 2, "global_batch": 3}, r"3 sequences cannot be shared out to 2 groups of 2 GPUs"),
        (
            {"tiles": "2", "reproducible": 4},
            r"reproducible: 4 is given, and tiles cuts sequences: .*; leave one",
        ),
        (
            {"sequence_parallel": 2, "reproducible": 4},
            r"reproducible: .*, and sequence_parallel cuts sequences",
        ),
        (
            {"sequence_parallel": 2, "shard_size": 1, "local_steps": {"every": 8}},
            r"sequence_parallel: 2 ranks share a sequence, and a replica that takes local steps has 1",
        ),
    ],
)
def test_what_cannot_be_planned_is_one_line(given, line):
    model = {**TINY, "activation_checkpointing": "full"}
    with pytest.raises(UserError, match=line):
        answer_plan(validate(PlanConfig, {"model": model, "gpus": 4, "seq_len": 64, **given}))


def test_a_training_config_has_the_setting_that_plans_have():
    assert TrainConfig.model_fields["sequence_parallel"].default == PlanConfig.model_fields["sequence_parallel"].default
