"""Plans of what travels in wire formats: the same collectives as an engine's, fewer bytes, less time on a slow link."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from zeroshard.comm import CONTROL, ObservedCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.show import text
from zeroshard.lab.predict.traffic import bytes_by_op
from zeroshard.models import build_model
from zeroshard.settings.validate import validate
from zeroshard.zero import STAGES, MixedPrecision, Zero

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 100, "seq_len": 16}
SMALL = {"name": "gpt2-demo", "n_layer": 2, "n_head": 2, "n_embd": 64}
CASE = {"world_size": 4, "gpus_per_node": 1, "network": "100Mbit/s", "micro_batch": 1, "dtype": "float32"}


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_knows_what_wire_formats_save(stage):
    exact = plan("gpt2-demo", stage=stage, **CASE).rows[0]
    int8 = plan("gpt2-demo", stage=stage, wire={"gather": "int8", "reduce": "int8"}, **CASE).rows[0]
    assert set(bytes_by_op(int8.by_link)) >= {"all_to_all", "all_gather"}
    assert sum(bytes_by_op(int8.by_link).values()) < 0.27 * sum(bytes_by_op(exact.by_link).values())
    assert int8.timing.comm_s < 0.4 * exact.timing.comm_s


def test_the_command_takes_the_settings_of_a_run_and_explains_the_exchange():
    given = {"model": "gpt2-demo", "gpus": 2, "stage": "2", "micro_batch": 1, "explain": True}
    said = answer_plan(validate(PlanConfig, {**given, "wire": {"grads": "int4"}})).text
    assert "all_to_all among 2 ranks, within a node" in said


def test_rows_of_stage_zero_that_have_no_wire_format_say_so():
    config = validate(PlanConfig, {"model": SMALL, "gpus": 2, "micro_batch": 1, "wire": {"grads": "int4"}})
    said = answer_plan(config).text
    assert any(line.startswith("The rows of stage 0 have no wire format") for line in said.splitlines())
    assert said.count("have no wire format") == 1


NODES = {"world_size": 4, "gpus_per_node": 2, "network": "1Gbit/s", "micro_batch": 1, "dtype": "float32"}


def _counted(comm, row, wire):
    """Bytes of a third step by operation and ranks."""
    observed = ObservedCommunicator(comm)
    model = build_model("gpt2-demo", overrides=SIZES)
    precision = MixedPrecision(**wire)
    zero = Zero(model, row, comm=observed, precision=precision, units=list(model.blocks))
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens = torch.zeros(1, SIZES["seq_len"], dtype=torch.int64)
    for _ in range(3):
        observed.drain()
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = Counter()
    for record in observed.records:
        if record.label != CONTROL:
            found[record.op, record.world_size] += record.num_bytes
    return found


BLOCKS = {"gather": "int8", "reduce": "int4"}


OF_COPIES = {("all_gather", 2): "within a node", ("all_gather", 4): "between nodes"}
OF_NODES = {("reduce_scatter", 2): "within a node", ("all_to_all", 2): "between nodes"}


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("stage", "wire", "given", "links"),
    [
        (3, {}, {"node_copy": 2}, OF_COPIES),
        (3, BLOCKS, {"node_copy": 2}, OF_COPIES),
        (1, {**BLOCKS, "node_size": 2}, {}, OF_NODES),
        (3, {**BLOCKS, "node_size": 2}, {}, OF_NODES),
    ],
)
def test_what_travels_is_planned_by_link_as_an_engine_on_two_nodes_counts_it(stage, wire, given, links):
    row = plan("gpt2-demo", stage=stage, wire=wire, overrides=SIZES, **given, **NODES).rows[0]
    assert row.node_size == row.as_dict()["node_size"] == wire.get("node_size", 0)
    strategy = replace(STAGES[stage], secondary_shard_size=given.get("node_copy"))
    planned = Counter()
    for each in row.by_link:
        planned[each.op, each.num_ranks] += each.num_bytes
    assert run_threads(lambda comm: _counted(comm, strategy, wire), 4) == [planned] * 4
    assert links.items() <= {(each.op, each.num_ranks): each.link for each in row.by_link}.items()
    assert row.as_dict()["messages"]["by_link"][0]["num_bytes"] == row.by_link[0].num_bytes


TOGETHER = {  # a setting by which ranks of a node work together: the stage that has it, and words that explain it
    "node_size": ("2", {"wire": {"grads": "int8", "node_size": 2}},
                  ("reduce_scatter among 2 ranks, within a node", "all_to_all among 2 ranks, between nodes",
                   "gradients added up in nodes of 2")),
    "node_copy": ("3", {"node_copy": 2}, ("all_gather among 2 ranks, within a node",)),
}  # fmt: skip


@pytest.mark.parametrize("setting", TOGETHER)
def test_what_a_node_does_together_is_explained(setting):
    stage, asked, words = TOGETHER[setting]
    given = {"model": SMALL, "gpus": 4, "gpus_per_node": 2, "network": "100Mbit/s", "micro_batch": 1, "stage": stage}
    said = answer_plan(validate(PlanConfig, {**given, **asked, "explain": True})).text
    assert all(each in said for each in words)


@pytest.mark.redundant
def test_a_second_copy_costs_its_bytes_and_saves_the_second_gather_between_nodes():
    without, near = (plan("gpt2-demo", stage=3, node_copy=size, overrides=SIZES, **NODES).rows[0] for size in (None, 2))
    padded = sum(buffer.layout.padded_numel for buffer in planner_for("gpt2-demo", overrides=SIZES).workload.buffers(4))
    assert near.step.before_update["params"] - without.step.before_update["params"] == padded // 2 * 4
    assert near.timing.comm_s < 0.85 * without.timing.comm_s
    cluster = planner_for("gpt2-demo", world_size=4, gpus_per_node=2, network="1Gbit/s").cluster
    each_s = [cluster.collective_s(m.op, m.num_bytes, m.world_size) for m in near.step.messages()]
    assert near.timing.comm_s == pytest.approx(sum(each_s), abs=1e-3)  # but for control messages


@pytest.mark.redundant
def test_rows_name_the_second_copy_and_groups_in_a_node_have_none():
    found = plan("gpt2-demo", node_copy=2, overrides=SIZES, **NODES)
    assert [(row.stage, row.shard_size, row.node_copy) for row in found.rows if row.stage == 3] == [
        (3, 4, 2),
        (3, 2, 0),
    ]
    assert {row.node_copy for row in found.rows if row.stage != 3} == {0}
    assert "3, copy over 2" in text(found)
    own = plan("gpt2-demo", stage=replace(STAGES[3], secondary_shard_size=2), overrides=SIZES, **NODES)
    assert [(row.shard_size, row.node_copy) for row in own.rows] == [(4, 2), (2, 0)]


def test_a_row_of_ones_own_with_a_copy_that_cannot_be_is_refused_in_a_line():
    def refused(words, stage, **given):
        with pytest.raises(UserError, match=words):
            plan("gpt2-demo", stage=stage, overrides=SIZES, **{**NODES, **given})

    row = replace(STAGES[3], secondary_shard_size=2)
    refused(r"^secondary_shard_size: groups of 2 do not partition .*2 ranks .*; leave it out", row, shard_size=2)
    refused(r"^node_copy: 2 is given, and the row has 2; leave one of the two out", row, node_copy=2)
    refused(r"^node_copy: 2 is given, and stage 1 has no sharded weights", 1, node_copy=2)
    refused(r"^node_copy: must be at least 2, got True; leave it out", 3, node_copy=True)
