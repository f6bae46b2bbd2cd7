"""An optimizer that lets tensors influence each other trains where each rank updates all of them, and nowhere else."""

import copy

import pytest
import torch
from torch import nn

import zeroshard
from estimating import Estimates
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import Zero
from zeroshard.zero.sharded_optimizer.optimizer import ShardedOptimizer

NUM_STEPS = 12
torch.manual_seed(0)
FIRST = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def loss(model, step, rank, num_ranks=2):
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return (model(rows.chunk(2)[rank]) - 1).square().mean() / num_ranks


def one_process():
    model = copy.deepcopy(FIRST)
    optimizer = Estimates(model.parameters())
    for step in range(NUM_STEPS):
        for rank in range(2):
            loss(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.param_groups[0]["d"] > 1e-3  # it has estimated something
    return model.state_dict()


def train(zero, optimizer, steps=range(NUM_STEPS)):
    for step in steps:
        for rank in range(2) if zero.comm.world_size == 1 else [zero.comm.rank]:
            loss(zero.model, step, rank, 2 // zero.comm.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return zero.state_dict()


def check(found):
    for name, value in one_process().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


def engine(comm, stage):
    return Zero(copy.deepcopy(FIRST), stage, [], comm)


def test_replicas_of_all_tensors_are_those_of_one_process():
    """`check` asserts it."""

    def rank_main(comm):
        zero = engine(comm, 0)
        return train(zero, zero.optimizer(Estimates))

    for found in run_threads(rank_main, 2):
        check(found)


@pytest.mark.redundant
def test_a_checkpoint_keeps_what_it_has_estimated(tmp_path):
    """`check` asserts it."""

    def rank_main(comm):
        zero = engine(comm, 0)
        train(zero, zero.optimizer(Estimates), range(6))
        zeroshard.save(tmp_path / "saved", zero, step=6)
        zero = engine(comm, 0)
        optimizer = zero.optimizer(Estimates)
        zeroshard.load(tmp_path / "saved", zero)
        return train(zero, optimizer, range(6, NUM_STEPS))

    check(run_threads(rank_main, 2)[0])


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_trains_it_at_every_stage_and_changes_between_them(stage):
    """`check` asserts it."""
    zero = engine(LocalCommunicator(), stage)
    optimizer = zero.optimizer(Estimates)
    train(zero, optimizer, range(6))
    zero.restage(3 - stage)
    check(train(zero, optimizer, range(6, NUM_STEPS)))


def test_a_share_of_the_tensors_is_refused_by_what_would_give_it():
    words = "as training makes progress it lets the gradients of one tensor change .*; take stage=0, where each rank "

    def rank_main(comm):
        for stage in (1, 2, 3):
            with pytest.raises(ValueError, match=f"^optimizer_cls: Estimates cannot be sharded: {words}"):
                engine(comm, stage).optimizer(Estimates)
        with pytest.raises(ValueError, match="optimizer_cls: Estimates cannot be sharded: as training makes progress"):
            ShardedOptimizer(copy.deepcopy(FIRST).parameters(), Estimates, comm=comm)
        zero = engine(comm, 0)
        optimizer = zero.optimizer(Estimates)
        train(zero, optimizer, range(6))
        with pytest.raises(ValueError, match=f"^optimizer_cls: Estimates cannot be sharded: {words}"):
            zero.restage(2)
        return train(zero, optimizer, range(6, NUM_STEPS))

    check(run_threads(rank_main, 2)[0])


@pytest.mark.parametrize("sharded_alone", [False, True])
def test_estimates_that_differ_between_ranks_are_noticed_if_a_declaration_was_wrong(sharded_alone):
    class Declared(Estimates):
        zero_reach = "element-wise"

    def rank_main(comm):
        if not sharded_alone:
            zero = engine(comm, 2)
            return train(zero, zero.optimizer(Declared))
        model = copy.deepcopy(FIRST)
        optimizer = ShardedOptimizer(model.parameters(), Declared, comm=comm)
        for step in range(NUM_STEPS):
            for rank in range(2):
                loss(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        return None

    with pytest.raises(ValueError, match=r"rank 0 has .*group 0, come = .*noted.*, rank 1 has .*at stage 0 alone"):
        run_threads(rank_main, 2)
