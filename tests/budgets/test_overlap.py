"""What computation hides of a slow link, and what it cannot."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from zeroshard import Zero
from zeroshard.comm import BlockingCommunicator, Link, ObservedCommunicator, ThrottledCommunicator, run_threads

COMPUTE_S = 8e-3  # of a unit's forward, and of its backward
NUM_UNITS, WIDTH = 5, 64
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Takes(torch.autograd.Function):
    """The identity, which takes its time both ways and lets other threads run."""

    @staticmethod
    def forward(ctx, x):
        time.sleep(COMPUTE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(COMPUTE_S)
        return grad


class Unit(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return Takes.apply(self.linear(x))


def exposed_s(stage: int, bytes_per_s: float, around=lambda comm: comm) -> float:
    """Seconds of a step that rank 0 of two stood still for weights and gradients."""

    def rank_main(comm):
        torch.manual_seed(0)
        model = nn.Sequential(*[Unit() for _ in range(NUM_UNITS)])
        observed = ObservedCommunicator(around(ThrottledCommunicator(comm, Link(0.0, bytes_per_s))))
        zero = Zero(model, stage=stage, units=list(model), comm=observed)
        optim = zero.optimizer(torch.optim.SGD, lr=1e-3)
        for step in range(3):
            if step == 1:
                observed.exposed.take()
            model(torch.ones(2, WIDTH)).sum().backward()
            optim.step()
            optim.zero_grad()
        return sum(seconds for label, seconds in observed.exposed.take().items() if label != "control") / 2

    return run_threads(rank_main, 2)[0]


@pytest.mark.parametrize(("stage", "num_transfers"), [(1, 2), (2, 2), (3, 3)])
def test_overlap_hides_most_of_a_slow_link(stage, num_transfers):
    transfer_s = 4e-3  # of a unit's weights or gradients: half of what it computes
    bytes_per_s = UNIT_BYTES / 2 / transfer_s
    total_s = num_transfers * NUM_UNITS * transfer_s
    blocking = min(exposed_s(stage, bytes_per_s, BlockingCommunicator) for _ in range(2))
    overlapped = min(exposed_s(stage, bytes_per_s) for _ in range(2))
    assert blocking > 0.9 * (total_s - transfer_s)  # stage 3 keeps the last unit between forward and backward
    assert overlapped < 0.5 * blocking


def test_a_faster_link_exposes_less():
    slow, fast = (min(exposed_s(2, UNIT_BYTES / transfer_s) for _ in range(2)) for transfer_s in (80e-3, 4e-3))
    assert fast < slow / 2  # of 400 and 20 ms of transfers; how much of them is hidden, a busy machine decides
