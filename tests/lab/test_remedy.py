"""Which remedy of a slow network is enough: the least that is, and what it costs."""

from dataclasses import replace

import pytest
import torch

from zeroshard.errors import UserError
from zeroshard.lab.planner.plan import plan
from zeroshard.lab.planner.planner import planner_for
from zeroshard.lab.planner.remedy import ENOUGH, remedies
from zeroshard.lab.predict.conversions import CONVERSIONS
from zeroshard.lab.predict.outer_steps import outer_step_messages
from zeroshard.zero import LocalSteps

SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 64}


@pytest.fixture(scope="module")
def planner():
    return planner_for(
        "gpt2-demo", world_size=8, gpus_per_node=4, network="100Mbit/s", gpu="a100-80gb", overrides=SIZES, seq_len=64
    )


def test_the_least_number_of_steps_between_outer_steps_is_found_with_its_memory(planner):
    answer = remedies(planner, (0, 1, 2, 3))
    rows = {row["remedy"]: row for row in answer.rows}
    assert not any(row["enough"] for name, row in rows.items() if name.startswith("stage"))
    found = rows["local steps, stage 0 over 4"]
    assert found["enough"]
    assert found["share_of_compute_bound_speed"] >= ENOUGH
    bound = planner.row(0, 1, 4, LocalSteps(found["every"])).tokens_per_s / found["share_of_compute_bound_speed"]
    assert planner.row(0, 1, 4, LocalSteps(found["every"] - 1)).tokens_per_s < ENOUGH * bound
    assert answer.value == min(row["every"] for row in rows.values() if row["enough"])
    narrow = rows["local steps, wire in bfloat16, stage 0 over 4"]
    assert narrow["every"] == pytest.approx(found["every"] / 2, rel=0.1)
    least = min(row["needed_bytes"] for row in rows.values())
    assert all(row["more_bytes"] == row["needed_bytes"] - least for row in rows.values())
    assert f"with an outer step every {answer.value} steps; measure the loss." in answer.sentence


def test_int8_both_ways_is_a_remedy_of_stages_that_have_an_owner_of_a_shard(planner):
    rows = {row["remedy"]: row for row in remedies(planner, (0, 2)).rows}
    assert "stage 0, weights and gradients in int8" not in rows
    step_s = {name: row["step_s"] for name, row in rows.items()}
    inside = step_s["stage 2 over 4, weights and gradients in int8"] / step_s["stage 2 over 4, gradients in bfloat16"]
    assert 0.5 < inside < 0.65  # between replicas a byte and its part of a scale for two bytes; latency is as it was
    one_a_node = replace(planner, cluster=replace(planner.cluster, ranks_per_node=1))
    rows = {row["remedy"]: row["step_s"] for row in remedies(one_a_node, (2,)).rows}
    assert rows["stage 2, weights and gradients in int8"] < 0.9 * rows["stage 2, gradients in bfloat16"]


def test_a_remedy_that_quantises_has_that_in_its_time(planner):
    slow = {f"int8 {kind}": (0.0, 1e-6) for kind in CONVERSIONS}
    quick = replace(planner.device, conversions=dict.fromkeys(slow, (0.0, 0.0)))
    rows = [
        {row["remedy"]: row for row in remedies(planner.on(device=device), (2,)).rows}
        for device in (quick, replace(planner.device, conversions=slow))
    ]
    name = "stage 2, weights and gradients in int8"
    assert rows[0][name]["quantise_s"] < 1e-3 < rows[1][name]["quantise_s"]  # what the host takes to issue it
    assert rows[1][name]["step_s"] > rows[0][name]["step_s"] + 0.5 * rows[1][name]["quantise_s"]
    assert rows[1]["stage 2"] == rows[0]["stage 2"]


def test_outer_steps_in_a_block_format_take_the_quantisers_time(planner):
    device = replace(planner.device, conversions={f"int8 {kind}": (1e-5, 1e-9) for kind in CONVERSIONS})
    found = planner.on(device=device).row(2, 1, 4, LocalSteps(10, wire="int8")).outer_steps
    buffers = planner.workload.buffers(4)
    # two replicas: a half is sent, a half added up and quantised again, and both halves come back
    halves = [-(-buffer.layout.shard_numel // 2) for buffer in buffers]
    assert found.quantise_s == pytest.approx(sum(5e-5 + 5e-9 * half for half in halves))
    assert planner.row(2, 1, 4, LocalSteps(10)).outer_steps.quantise_s == 0


def test_an_outer_step_costs_a_share_of_a_step_and_global_weights_and_momentum(planner):
    without, every = planner.row(2, 1, 4), 10
    row = planner.row(2, 1, 4, LocalSteps(every))
    shard_numel = sum(buffer.layout.shard_numel for buffer in planner.workload.buffers(4))
    assert row.outer_steps.outer_bytes == 8 * shard_numel
    assert row.outer_steps.crossing_bytes == 4 * shard_numel
    assert row.needed_bytes >= without.needed_bytes
    crossing = [m for m in row.step.messages() if m.world_size != 4]
    assert not crossing
    twice = planner.row(2, 1, 4, LocalSteps(2 * every))
    alone = row.timing.step_s - row.outer_steps.comm_s / every
    assert twice.timing.step_s == pytest.approx(alone + row.outer_steps.comm_s / (2 * every))


def test_fragments_share_out_what_meets(planner):
    buffers = planner.workload.buffers(4)
    whole = outer_step_messages(buffers, LocalSteps(8), 0, 2, unsharded_masters=False)
    settings = LocalSteps(8, fragments=2, wire=torch.bfloat16)
    parts = [outer_step_messages(buffers, settings, fragment, 2, unsharded_masters=True) for fragment in range(2)]
    differences, global_weights = (
        [m for part in parts for m in part if m.phase == phase] for phase in ("difference", "global_weights")
    )
    assert sorted(m.buffer for m in differences) == sorted(m.buffer for m in whole)
    assert 2 * sum(m.num_bytes for m in differences) == sum(m.num_bytes for m in whole)
    assert sum(m.num_bytes for m in global_weights) == 4 * sum(m.num_bytes for m in whole)


def test_a_plan_may_have_local_steps(planner):
    given = {"gpu": "a100-80gb", "overrides": SIZES, "seq_len": 64, "micro_batch": 1, "world_size": 8}
    found = plan("gpt2-demo", **given, shard_size=4, local_steps=LocalSteps(32))
    assert [row.stage for row in found.rows] == [0, 1, 2, 3]
    assert "replicated 2 times, with an outer step every 32 steps" in found.advice
    assert found.as_dict()["rows"][0]["outer_steps"]["every"] == 32
    with pytest.raises(UserError, match=r"local_steps.every: 32 needs several replicas"):
        plan("gpt2-demo", **given, local_steps=LocalSteps(32))
    with pytest.raises(UserError, match="nothing fits on 8 x a100-80gb"):
        remedies(replace(planner, headroom=0.9999999), (0, 1, 2, 3))
