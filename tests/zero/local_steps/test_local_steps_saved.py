"""Replicas that take local steps in checkpoints: the same bits after a restart, and what others read."""

import pytest
import torch
from torch import nn

from exactness import same_bits
from local_steps_runs import ALL_KINDS, DILOCO, SOAK, Net, both, engine_of, loss_of, train
from zeroshard import checkpoint
from zeroshard.comm import run_threads
from zeroshard.zero import Zero


def _saved(path, settings, at, stage=2, shard_size=1, world_size=2):
    """What a run of 9 steps ends with, by rank, that was saved after ``at`` steps: global weights, local weights."""

    def rank_main(comm):
        engine = engine_of(comm, stage, settings, shard_size)
        train(comm, engine, range(at))
        checkpoint.save(path, engine[1], step=at)
        train(comm, engine, range(at, 9))
        return both(engine[1])

    return run_threads(rank_main, world_size)


@pytest.mark.redundant
@pytest.mark.parametrize("now", [3, pytest.param(0, marks=SOAK), pytest.param(2, marks=SOAK)])
@pytest.mark.parametrize("at", [2, 3, pytest.param(0, marks=SOAK), pytest.param(4, marks=SOAK)])
@ALL_KINDS
def test_a_restart_has_the_same_bits_at_any_stage(settings, at, now, tmp_path):
    """Saved before all steps, between outer steps, and at one."""

    def rank_main(comm):
        engine = engine_of(comm, now, settings)
        train(comm, engine, range(1))  # another past
        checkpoint.load(tmp_path / "c", engine[1])
        train(comm, engine, range(at, 9))
        return both(engine[1])

    expected = _saved(tmp_path / "c", settings, at)
    found = run_threads(rank_main, 2)
    for (global_weights, local), (global_weights_now, local_now) in zip(expected, found, strict=True):
        assert same_bits(global_weights, global_weights_now)
        assert same_bits(local, local_now)


@pytest.mark.redundant
def test_another_number_of_replicas_begins_at_the_global_weights(tmp_path):
    expected = _saved(tmp_path / "c", DILOCO, 5, shard_size=2, world_size=4)

    def rank_main(comm):
        engine = engine_of(comm, 1, DILOCO)
        checkpoint.load(tmp_path / "c", engine[1])
        before = both(engine[1])
        states = engine[1].optim_state_dict()["state"]
        train(comm, engine, range(5, 9))
        return before, states, both(engine[1])[0]

    assert expected
    by_rank = run_threads(rank_main, 3)
    (global_weights, local), *_ = by_rank[0]
    assert not same_bits(global_weights, local)  # the first two replicas go on where they were
    (global_weights_of_third, third), states, _ = by_rank[2]
    assert same_bits(global_weights, global_weights_of_third)
    assert same_bits(global_weights, third)
    first_states = by_rank[0][1]
    assert all(torch.equal(states[k]["exp_avg"], first_states[k]["exp_avg"]) for k in states)
    assert all(same_bits(after, by_rank[0][2]) for _, _, after in by_rank)


def test_statistics_of_modules_go_on_as_each_replica_had_them_and_are_made_alike_at_outer_steps(tmp_path):
    def rank_main(comm, resumes):
        net = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
        zero = Zero(net, 2, comm=comm, shard_size=1, local_steps=DILOCO)
        engine = net, zero, zero.optimizer(torch.optim.SGD, lr=0.03)
        if resumes:
            checkpoint.load(tmp_path / "c", zero)
        else:
            train(comm, engine, range(2))
            checkpoint.save(tmp_path / "c", zero, step=2)
        before = net[1].running_mean.clone()
        loss_of(net, 2, comm.rank, comm.world_size).backward()
        engine[2].step()
        engine[2].zero_grad()
        local = net[1].running_mean.clone()
        zero.local_steps.step()
        return before, local, net[1].running_mean.clone()

    went_on, resumed = (run_threads(lambda comm, r=r: rank_main(comm, r), 2) for r in (False, True))
    for one, other in zip(went_on, resumed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    (one, local, common), (other, _, theirs) = resumed
    assert not torch.equal(one, other)
    assert torch.equal(common, theirs)
    assert torch.equal(common, local)  # the first replica's


def test_whoever_reads_weights_reads_the_global_weights(tmp_path):
    def save(comm):
        engine = engine_of(comm, 2, DILOCO)
        train(comm, engine, range(4))
        checkpoint.save(tmp_path / "c", engine[1], step=4)
        return both(engine[1])

    expected, local = run_threads(save, 2)[0]
    assert not same_bits(expected, local)

    def rank_main(comm):
        replicas = engine_of(comm, 1, DILOCO)
        checkpoint.load(tmp_path / "c", replicas[1])
        net = Net(7)
        plain = Zero(net, 3, comm=comm)
        optim = plain.optimizer(torch.optim.AdamW, lr=0.1)
        checkpoint.load(tmp_path / "c", plain)
        loss_of(net, 0, 0, 1).backward()
        kinds = {kind for state in optim.state.values() for kind in state}
        optim.step()
        return both(replicas[1])[0], kinds

    global_weights, kinds = run_threads(rank_main, 2)[0]
    assert kinds == {"step", "exp_avg", "exp_avg_sq"}
    full = checkpoint.consolidate(tmp_path / "c")
    assert same_bits(expected, global_weights)
    assert same_bits(global_weights, full["model"])
    assert set(full["optimizer"]["state"]) == set(global_weights)
    assert {kind for state in full["optimizer"]["state"].values() for kind in state} == kinds


@pytest.mark.redundant
def test_replicas_may_begin_at_a_checkpoint_that_knows_of_none_and_take_outer_steps_as_if_from_its_start(tmp_path):
    """So that checkpoints, evaluations and the last step fall on the same multiples of ``every``."""

    def save(comm):
        net = Net()
        zero = Zero(net, 1, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW, lr=0.03)
        loss_of(net, 0, comm.rank, comm.world_size).backward()
        optim.step()
        checkpoint.save(tmp_path / "c", zero, step=4)
        return zero.state_dict()

    def load(comm):
        engine = engine_of(comm, 3, DILOCO)
        train(comm, engine, range(4))
        checkpoint.load(tmp_path / "c", engine[1])
        found = both(engine[1])
        return found, [outer_step.step for outer_step in train(comm, engine, range(4, 9))]

    expected = run_threads(save, 2)[0]
    for (global_weights, local), outer_steps in run_threads(load, 2):
        assert same_bits(expected, global_weights)
        assert same_bits(expected, local)
        assert outer_steps == [6, 9]
