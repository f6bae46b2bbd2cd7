import threading

import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator
from zeroshard.optim import AdamW8bit
from zeroshard.zero import MixedPrecision, Offload, Zero


class OnTheHost:
    """Says of every piece that it must be brought, and counts."""

    def __init__(self):
        self.brought, self.taken_back = [], 0

    def to_bring(self, pieces):
        return list(pieces)

    def bring(self, pieces):
        self.brought.append(len(pieces))

    def take_back(self):
        self.taken_back += 1


class Counting(torch.optim.Optimizer):
    """It counts its steps in its param groups, so they must be as many as the user's."""

    zero_reach = "element-wise"

    def __init__(self, params):
        super().__init__(params, {"steps": 0})

    def step(self, closure=None):
        self._update()

    @torch.no_grad()
    def _update(self):
        for group in self.param_groups:
            group["steps"] += 1
            for param in (param for param in group["params"] if param.grad is not None):
                self.state[param]["sum"] = self.state[param].get("sum", 0) + param.grad
                param -= 0.1 / group["steps"] * self.state[param]["sum"]


def _engine(cls=torch.optim.AdamW, offload=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    precision = MixedPrecision(None, torch.bfloat16)
    zero = Zero(model, 2, units=list(model), comm=LocalCommunicator(), precision=precision, offload=offload)
    zero.optimizer(cls)
    (piecewise,) = zero._optimizers.piecewise
    piecewise.operands.members.append(member := OnTheHost())
    return zero, piecewise.optimizer, member


@pytest.mark.redundant(but=["AdamW"])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, AdamW8bit])
def test_members_bring_their_operands_together_unit_by_unit(cls):
    zero, optim, member = _engine(cls)
    zero.model(torch.ones(2, 4)).square().mean().backward()
    optim.step()
    assert member.brought == [2, 2]  # weight and bias of each unit
    assert all(param.grad.dtype == torch.bfloat16 for param in zero.model.parameters())  # as before the step
    assert len(optim.state) == 4


@pytest.mark.parametrize(("cls", "thread"), [(AdamW8bit, "zeroshard-update_0"), (Counting, "MainThread")])
def test_a_class_that_may_step_unit_by_unit_steps_on_the_thread_of_updates(cls, thread, monkeypatch):
    """Of one that has not said that it may, all are brought at once; weights are the same with and without."""
    update, threads, found = cls._update, set(), []

    def spying(optimizer):
        threads.add(threading.current_thread().name)
        update(optimizer)

    monkeypatch.setattr(cls, "_update", spying)
    for offload in (None, Offload()):
        zero, optim, _ = _engine(cls, offload)
        threads.clear()
        for _ in range(3):
            zero.model(torch.ones(2, 4)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        found.append([param.detach().clone() for param in zero.model.parameters()])
        assert cls is not Counting or optim.param_groups[0]["steps"] == 3
    assert thread in threads
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_step_without_gradients_brings_nothing():
    _, optim, member = _engine()
    optim.step()
    assert member.brought == []
    assert not optim.state
