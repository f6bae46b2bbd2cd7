import torch
from torch import nn

from zeroshard.comm import LocalCommunicator
from zeroshard.zero import MixedPrecision, Zero
from zeroshard.zero.core.optimizer import StepOperands


class OnTheHost(StepOperands):
    """Says of every piece that it must be brought, and counts."""

    def __init__(self):
        self.brought, self.taken_back = [], 0

    def elsewhere(self, pieces):
        return list(pieces)

    def bring(self, pieces):
        self.brought.append(len(pieces))

    def take_back(self):
        self.taken_back += 1


def _engine():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero = Zero(model, 2, units=list(model), comm=LocalCommunicator(), precision=MixedPrecision(None, torch.bfloat16))
    zero.optimizer(torch.optim.AdamW)
    (piecewise,) = zero._optimizers.piecewise
    piecewise.operands.members.append(member := OnTheHost())
    return zero, piecewise.optimizer, member


def test_members_bring_their_operands_together_unit_by_unit():
    zero, optim, member = _engine()
    zero.model(torch.ones(2, 4)).square().mean().backward()
    optim.step()
    assert member.brought == [2, 2]  # weight and bias of each unit
    assert all(param.grad.dtype == torch.bfloat16 for param in zero.model.parameters())  # as before the step
    assert len(optim.state) == 4


def test_a_step_without_gradients_brings_nothing():
    _, optim, member = _engine()
    optim.step()
    assert member.brought == []
    assert not optim.state
