"""Runs whose weights and gradients travel in wire formats: held to their plan, resumed, and refused where nonsense."""

from pathlib import Path

import pytest
import torch

from tiny_runs import train_on
from zeroshard.comm import run_threads
from zeroshard.host.errors import UserError
from zeroshard.lab.planner.run_plan import predict
from zeroshard.train.setup.assemble import check_shard_size

CPU = torch.device("cpu")
INT8 = {"weights": "int8", "grads": "int8", "block": 64}


def _trained(comm, config, until=None):
    status, run = train_on(comm, config, until=until, predict=predict)
    return status, run.strategy.state_dict(), run.contract


@pytest.fixture(autouse=True)
def _small_parameters_travel_so_too(monkeypatch):
    monkeypatch.setattr("zeroshard.zero.precision.EXACT_NUMEL", 64)


@pytest.mark.redundant
def test_a_run_that_is_resumed_at_another_stage_has_the_same_bits(tiny_config):
    config = tiny_config(strategy="zero2", wire=INT8, eval_interval=0)
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=3), 2)
    rest = parts.model_copy(update={"resume": "auto", "strategy": "zero3"})
    for (_, state, _), (_, state_then, _) in zip(whole, run_threads(lambda comm: _trained(comm, rest), 2), strict=True):
        assert all(torch.equal(state[name], state_then[name]) for name in state)
    assert Path(parts.out).exists()


def test_a_node_that_does_not_share_out_the_ranks_is_refused(tiny_config):
    for size, num_ranks, todo in ((2, 1, "leave it out"), (2, 2, "leave it out"), (3, 4, "choose one of 2")):
        config = tiny_config(strategy="zero2", wire={"grads": "int8", "node_size": size})
        with pytest.raises(UserError, match=rf"^wire.node_size: .* do not partition {num_ranks} ranks into .*; {todo}"):
            check_shard_size(config, num_ranks)
    for size, num_ranks, todo in ((2, 2, "leave it out"), (3, 4, "choose one of 2"), (4, 4, "choose one of 2")):
        config = tiny_config(strategy="zero3", node_copy=size)
        with pytest.raises(
            UserError, match=rf"^node_copy: groups of {size} do not partition {num_ranks} ranks .*; {todo}"
        ):
            check_shard_size(config, num_ranks)
