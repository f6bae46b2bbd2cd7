"""Plans of what travels in wire formats: the same collectives as an engine's, fewer bytes, less time on a slow link."""

from __future__ import annotations

import pytest

from zeroshard.errors import UserError
from zeroshard.lab import plan
from zeroshard.lab.planner.command import answer_plan
from zeroshard.lab.planner.config import PlanConfig
from zeroshard.train.config.validate import validate

CASE = {"world_size": 4, "gpus_per_node": 1, "network": "100Mbit/s", "micro_batch": 1, "dtype": "float32"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_plan_knows_what_wire_formats_save(stage):
    exact = plan("gpt2-demo", stage=stage, **CASE).rows[0]
    int8 = plan("gpt2-demo", stage=stage, wire={"gather": "int8", "reduce": "int8"}, **CASE).rows[0]
    assert set(int8.messages_bytes) >= {"all_to_all", "all_gather"}
    assert sum(int8.messages_bytes.values()) < 0.27 * sum(exact.messages_bytes.values())
    assert int8.timing.comm_s < 0.4 * exact.timing.comm_s


def test_the_command_takes_the_settings_of_a_run_and_explains_the_exchange():
    given = {"model": "gpt2-demo", "gpus": 2, "stage": "2", "micro_batch": 1, "explain": True}
    said = answer_plan(validate(PlanConfig, {**given, "wire": {"grads": "int4"}})).text
    assert "quantised shards, each to its owner: (W-1)/W P q" in said
    for wrong in ({"stage": "0", "explain": False}, {"stage": "all", "explain": False, "dry_run": True}):
        with pytest.raises(UserError, match=r"^wire.grads: stage 0 has no owner of a shard"):
            validate(PlanConfig, {**given, **wrong, "wire": {"grads": "int8"}})
