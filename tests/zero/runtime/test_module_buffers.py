"""Buffers that forwards change are alike on all ranks after each backward, or kept."""

import pytest
import torch
from torch import nn

from nets import WIDTH, Net, rows
from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.zero import STAGES, Zero


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.cache.add_(x.detach().sum())
        return self.norm(x)


def build():
    return Net(block=Normed)


def _statistics(model):
    return {name: value.clone() for name, value in model.named_buffers() if "running" in name or "num_" in name}


def _train(comm, stage, sync, steps):
    model = build()
    observed = ObservedCommunicator(comm)
    zero = Zero(model, stage, comm=observed, buffers=sync)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    observed.records.clear()
    found = []
    for step in steps:
        model(rows(comm.rank, step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        found.append(_statistics(model))
    return found, model.blocks[0].cache.clone(), [r.label for r in observed.records if r.label.startswith("buffers")]


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_running_statistics_are_those_of_rank_0_or_each_ranks_own(stage):
    kept = run_threads(lambda comm: _train(comm, stage, "keep", range(1)), 2)
    sent = run_threads(lambda comm: _train(comm, stage, "broadcast", range(1)), 2)
    for name, own in kept[0][0][0].items():
        other = kept[1][0][0][name]
        assert "num" in name or not torch.equal(own, other)
        for rank in range(2):
            assert torch.equal(sent[rank][0][0][name], own)
    assert not torch.equal(sent[0][1], sent[1][1])  # no part of the state
    assert (kept[0][2], sent[0][2]) == ([], ["buffers/step"])


def test_constants_travel_once():
    class Constant(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.ones(4))

    def go(comm):
        model = Constant()
        observed = ObservedCommunicator(comm)
        Zero(model, 1, comm=observed)
        observed.records.clear()
        model(rows(comm.rank)).sum().backward()
        return [record.label for record in observed.records if record.label.startswith("buffers")]

    assert run_threads(go, 2) == [[], []]


def test_buffers_that_one_rank_alone_changes_become_alike_too():
    def go(comm):
        model = build()
        Zero(model, 3, comm=comm)
        model.blocks[1].norm.running_mean.fill_(comm.rank)
        model.eval()
        if comm.rank == 1:
            model.blocks[0].norm.running_mean.fill_(7)
        model(rows(comm.rank)).sum().backward()
        return [block.norm.running_mean.tolist() for block in model.blocks]

    assert run_threads(go, 2) == [[[0.0] * WIDTH] * 3] * 2
