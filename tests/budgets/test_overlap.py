"""Communication is hidden behind computation: what a slow link exposes of a step, on a clock that the test keeps.

Computing takes time because it moves the clock, the link because `ThrottledCommunicator` sleeps on it, and nothing
else does: the seconds below are what the order of the engine's operations makes of these, on any machine.
"""

import pytest
import torch
from torch import nn

from fake_time import Clock
from zeroshard import Zero
from zeroshard.comm import (
    BlockingCommunicator,
    Link,
    NullCommunicator,
    ObservedCommunicator,
    ThrottledCommunicator,
)
from zeroshard.comm.wrappers import observe, stopwatch, throttle

COMPUTE_S = 8e-3  # of a unit's forward, and of its backward
NUM_UNITS, WIDTH = 5, 64
UNIT_BYTES = (WIDTH * WIDTH + WIDTH) * 4


class Takes(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.sleep(COMPUTE_S)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.sleep(COMPUTE_S)
        return grad, None


class Unit(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.clock = clock

    def forward(self, x):
        return Takes.apply(self.linear(x), self.clock)


@pytest.fixture
def exposed_s(monkeypatch):
    """`exposed_s(stage, bytes_per_s, around)`: seconds of a step that computation stood still for weights and grads."""
    clock = Clock()
    for module in (stopwatch, observe, throttle):
        monkeypatch.setattr(module, "time", clock)

    def measure(stage, bytes_per_s, around=lambda comm: comm):
        model = nn.Sequential(*[Unit(clock) for _ in range(NUM_UNITS)])
        link = ThrottledCommunicator(NullCommunicator(2), Link(0.0, bytes_per_s))
        observed = ObservedCommunicator(around(link))
        zero = Zero(model, stage=stage, units=list(model), comm=observed)
        optim = zero.optimizer(torch.optim.SGD, lr=1e-3)
        for step in range(3):
            if step == 1:
                observed.exposed.take_seconds()
            model(torch.ones(2, WIDTH)).sum().backward()
            optim.step()
            optim.zero_grad()
        return sum(seconds for label, seconds in observed.exposed.take_seconds().items() if label != "control") / 2

    return measure


@pytest.mark.parametrize(("stage", "num_transfers"), [(1, 10), (2, 10), (3, 14)])
def test_overlap_hides_all_of_a_slow_link_but_the_last_gradients(stage, num_transfers, exposed_s):
    """Stage 3 gathers weights twice, but for the last unit's, which it keeps between forward and backward."""
    transfer_s = 4e-3  # of a unit's weights or gradients: half of what it computes
    bytes_per_s = UNIT_BYTES / 2 / transfer_s
    assert exposed_s(stage, bytes_per_s, BlockingCommunicator) == pytest.approx(num_transfers * transfer_s, rel=1e-2)
    assert exposed_s(stage, bytes_per_s) == pytest.approx(transfer_s, rel=1e-2)
