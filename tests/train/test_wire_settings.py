"""Runs whose weights and gradients travel in wire formats: held to their plan, resumed, and refused where nonsense."""

from pathlib import Path

import pytest
import torch

from tiny_runs import train_on
from zeroshard.comm import run_threads
from zeroshard.errors import UserError
from zeroshard.lab.planner.run_plan import predict
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.config.validate import validate
from zeroshard.train.setup.assemble import check_shard_size

CPU = torch.device("cpu")
INT8 = {"weights": "int8", "grads": "int8", "block": 64}


def _trained(comm, config, until=None):
    status, run = train_on(comm, config, until=until, predict=predict)
    return status, run.strategy.state_dict(), run.contract


@pytest.fixture(autouse=True)
def _small_parameters_travel_so_too(monkeypatch):
    monkeypatch.setattr("zeroshard.zero.precision.EXACT_NUMEL", 64)


def test_a_run_that_is_resumed_at_another_stage_has_the_same_bits(tiny_config):
    config = tiny_config(strategy="zero2", wire=INT8, eval_interval=0)
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=3), 2)
    rest = parts.model_copy(update={"resume": "auto", "strategy": "zero3"})
    for (_, state, _), (_, state_then, _) in zip(whole, run_threads(lambda comm: _trained(comm, rest), 2), strict=True):
        assert all(torch.equal(state[name], state_then[name]) for name in state)
    assert Path(parts.out).exists()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "ddp", "wire": {"grads": "int8"}}, r"^wire.grads: int8 is given, and ddp does not use"),
        ({"strategy": "fsdp2", "wire": {"weights": "int4"}}, r"^wire.weights: int4 is given, and fsdp2 does not use"),
        ({"strategy": "zero1-torch", "wire": {"grads": "bfloat16"}}, r"^wire.grads: bfloat16 .* zero1-torch"),
        ({"strategy": "zero0", "wire": {"grads": "int8"}}, r"^wire.grads: int8 is given, and stage 0 has no wire"),
        ({"strategy": "auto", "wire": {"grads": "int8"}}, r"^wire.grads: int8 is given, and auto may choose stage 0"),
        ({"strategy": "zero3", "wire": {"grads": "int8", "block": 100}}, r"^wire.block: blocks of 100 elements do not"),
        ({"strategy": "zero3", "wire": {"grads": "int8", "block": 0}}, r"^wire.block: blocks of 0 elements do not"),
        ({"strategy": "zero2", "wire": {"node_size": 2}}, r"^wire.node_size: 2 is given, and gradients have no"),
        ({"strategy": "zero2", "wire": {"grads": "int8", "node_size": 1}}, r"^wire.node_size: 1 GPU has nothing to"),
        ({"strategy": "zero2", "wire": {"grads": "int8", "node_size": -1}}, r"^wire.node_size: "),
        (
            {"strategy": "zero2", "shard_size": 2, "nproc": 4, "wire": {"grads": "int8", "node_size": 2}},
            r"^wire.node_size: 2 is given, and with shard_size = 2 gradients are added up inside these ranks; leave",
        ),
        ({"strategy": "zero2", "node_copy": 2}, r"^node_copy: 2 is given, and zero2 has no sharded weights"),
        ({"strategy": "fsdp2", "node_copy": 2}, r"^node_copy: 2 is given, and fsdp2 has no sharded weights"),
        (
            {"strategy": "zero3", "node_copy": 2, "reshard_after_forward": False},
            r"^node_copy: 2 is given, and weights that stay unsharded",
        ),
        ({"strategy": "zero3", "wire": {"grads": "bfloat16", "block": 64}}, r"^wire.block: 64 is given, and no wire"),
    ],
)
def test_wires_that_make_no_sense_are_refused(given, words):
    with pytest.raises(UserError, match=words):
        validate(TrainConfig, {"model": "gpt2-demo", "data": "synthetic", **given})


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
