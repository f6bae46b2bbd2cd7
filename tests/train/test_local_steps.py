"""Runs whose replicas take local steps: held to their plan, logged, resumed, and refused where they make no sense."""

from pathlib import Path

import pytest
import torch

from tiny_runs import built, events_of, train_on
from zeroshard import checkpoint
from zeroshard.comm import run_threads
from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.lab.planner.run_plan import predict
from zeroshard.settings.local_steps import early_momentum, steps_after_last_outer_step
from zeroshard.settings.validate import validate
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.loop import train
from zeroshard.train.loop.outer_steps import other_replicas
from zeroshard.train.setup.build import build_run
from zeroshard.train.state.folders import checkpoint_folder

CPU = torch.device("cpu")
SOAK = pytest.mark.soak
FRAGMENTS = {"every": 3, "fragments": 2, "outer_lr": 0.4}


def _trained(comm, config, until=None, planned=False):
    status, run = train_on(comm, config, until=until, predict=predict if planned else None)
    with run.local_steps.global_weights():
        global_weights = run.strategy.state_dict()
    return status, global_weights, run.strategy.state_dict(), run.contract


@pytest.mark.redundant(but=["zero0-2-given1"])
@pytest.mark.parametrize(
    ("strategy", "shard_size", "given"),
    [
        ("zero2", 2, {"every": 3}),
        ("zero0", 2, FRAGMENTS),
        pytest.param("zero3", 2, FRAGMENTS, marks=SOAK),
        pytest.param("zero1", 1, {"every": 2, "wire": "bfloat16"}, marks=SOAK),
        pytest.param("zero0", 2, {"every": 2, "wire": "int8"}, marks=SOAK),
        pytest.param("zero3", 1, {**FRAGMENTS, "wire": "int4"}, marks=SOAK),
    ],
)
def test_a_run_keeps_its_plan_and_logs_its_outer_steps(tiny_config, strategy, shard_size, given):
    config = tiny_config(
        strategy=strategy, shard_size=shard_size, local_steps=given, plan={"enforce": True}, eval_interval=0
    )
    (status, global_weights, _, contract), *others = run_threads(lambda comm: _trained(comm, config, planned=True), 4)
    assert status == ExitStatus.OK
    assert (contract.num_broken, contract.difference) == (0, "")
    assert contract.num_checked == 5
    assert all(torch.equal(global_weights[name], other[1][name]) for other in others for name in global_weights)
    events = events_of(config.out, "step")
    outer_steps = {event["step"]: event["outer_step"] for event in events if "outer_step" in event}
    every = given["every"]
    assert {step for step, each in outer_steps.items() if each["arrived"] == [0]} == set(
        range(every // given.get("fragments", 1), 7, every)
    )
    assert all(outer_step["difference_norm"] > 0 and outer_step["num_bytes"] > 0 for outer_step in outer_steps.values())
    assert {outer_step["num_replicas"] for outer_step in outer_steps.values()} == {4 // shard_size}
    of_a_replica = {event["step"]: event["loss"] for event in events}
    assert all(each["loss"] == pytest.approx(of_a_replica[step], rel=0.2) for step, each in outer_steps.items())


@pytest.mark.redundant
@pytest.mark.parametrize("given", [{"every": 3}, pytest.param(FRAGMENTS, marks=SOAK)], ids=["diloco", "fragments"])
def test_a_run_that_stops_between_outer_steps_goes_on_to_the_bit(tiny_config, given):
    config = tiny_config(strategy="zero2", shard_size=1, local_steps=given, eval_interval=2)
    parts = config.model_copy(update={"out": f"{config.out}-parts"})
    whole = run_threads(lambda comm: _trained(comm, config), 2)
    run_threads(lambda comm: _trained(comm, parts, until=4), 2)
    resumed = run_threads(lambda comm: _trained(comm, parts.model_copy(update={"resume": "auto"})), 2)
    for (_, global_weights, local, _), (_, global_weights_then, local_then, _) in zip(whole, resumed, strict=True):
        assert all(torch.equal(global_weights[name], global_weights_then[name]) for name in global_weights)
        assert all(torch.equal(local[name], local_then[name]) for name in local)
    assert events_of(parts.out, "eval")[-1] == events_of(config.out, "eval")[-1]
    manifest = checkpoint.read_manifest(checkpoint.latest(checkpoint_folder(Path(parts.out))))
    assert [guard["num_skipped"] for guard in manifest.extra["guards"]] == [0, 0]


@pytest.mark.redundant
def test_ranks_stop_together_where_replicas_meet(tiny_config):
    """A rank that is told to stop between outer steps goes on until the next."""
    config = tiny_config(strategy="zero1", shard_size=1, local_steps={"every": 4}, eval_interval=0, max_steps=8)

    def go(comm):
        status, run = train_on(comm, config, stop_wanted=lambda: comm.rank == 1)
        return status, run.local_steps.num_steps

    assert run_threads(go, 2) == [(ExitStatus.TERMINATED, 4)] * 2


def test_a_replica_that_diverges_ends_the_run_in_a_line(tiny_config, capsys):
    config = tiny_config(strategy="zero1", shard_size=1, local_steps={"every": 2}, eval_interval=0)

    def go(comm):
        run = build_run(config, comm, CPU)
        if comm.rank == 1:
            step = run.local_steps.step

            def poisoned(**kwargs):
                for piece in run.strategy.zero.pieces() if run.local_steps.num_steps else ():
                    piece.data.fill_(float("inf"))
                return step(**kwargs)

            run.local_steps.step = poisoned
        status = train(run)
        run.close()
        return status

    assert run_threads(go, 2) == [ExitStatus.NOT_FINITE] * 2
    assert "error: local_steps: after step 2 the difference of fragment 0 has norm" in capsys.readouterr().err


def test_a_world_of_one_replica_and_more_fragments_than_units_are_refused(tiny_config):
    config = tiny_config(shard_size=2, local_steps={"every": 4})
    with pytest.raises(UserError, match=r"local_steps.every: 4 needs several replicas, and 2 ranks of shard_size 2"):
        run_threads(lambda comm: built(config, comm), 2)
    config = tiny_config(shard_size=1, local_steps={"every": 8, "fragments": 4})
    with pytest.raises(UserError, match=r"local_steps.fragments: 4 are more than the 3 units of the model; give at"):
        run_threads(lambda comm: built(config, comm), 2)


@pytest.mark.parametrize(
    ("given", "max_steps", "words"),
    [
        ({}, 500, "up to 4 of the last steps; with 496 or 504 it misses 0"),
        ({}, 512, ""),
        ({"fragments": 2}, 16, ""),
        ({"fragments": 2}, 14, "up to 6 of the last steps; with 12 or 16 it misses 4"),
    ],
)
def test_steps_after_the_last_outer_step_are_told_of(given, max_steps, words):
    config = validate(TrainConfig, {"local_steps": {"every": 8, **given}, "shard_size": 1})
    said = steps_after_last_outer_step(config.local_steps, max_steps)
    assert said.endswith(words) if words else not said


def test_new_weights_under_a_large_outer_momentum_are_told_of(tiny_config, capsys):
    config = tiny_config(shard_size=1, local_steps={"every": 4})
    said = early_momentum(config.local_steps)
    assert said.startswith(
        "local_steps.outer_momentum: 0.9 with local_steps.outer_lr = 0.7 moves common weights by up to 7 times"
    )
    assert "--resume auto, or give 0.5" in said
    run_threads(lambda comm: built(config, comm), 2)
    assert capsys.readouterr().err.count(said) == 1
    for settles in ({"outer_momentum": 0.5}, {"outer_lr": 1.0, "outer_momentum": 0.0}):
        assert not early_momentum(tiny_config(shard_size=1, local_steps={"every": 4, **settles}).local_steps)
    assert not early_momentum(tiny_config().local_steps)


def test_a_run_that_goes_on_says_what_becomes_of_its_replicas():
    local, plain = {"local_steps": {"every": 8}, "shard_size": 2}, {"shard_size": 2}
    assert other_replicas(local, 4, local, 4) == other_replicas(plain, 4, plain, 8) == []
    assert "there were 2 replicas, now there are 3" in other_replicas(local, 4, local, 6)[0]
    assert "the steps of the last ones since their last outer step are lost" in other_replicas(local, 6, local, 4)[0]
    assert "without outer momentum" in other_replicas(local, 4, plain, 4)[0]
    assert "take local steps from here on" in other_replicas(plain, 4, local, 4)[0]
