"""Accounts of memory do not make a step wait for the host's updates."""

from __future__ import annotations

import torch
from torch import nn

from zeroshard.zero import Offload, Zero
from zeroshard.zero.offload import placement
from zeroshard.zero.offload.executor import Executor


class Late(Executor):
    """Runs an update when somebody waits for it, and no sooner."""

    def _begin(self, jobs):
        self.left = list(jobs)

    def wait(self, update):
        while update.pending:
            job, run = self.left.pop(0)
            job.end(self._run(job, run))


def test_bytes_are_counted_while_updates_are_under_way_except_those_that_make_states(monkeypatch):
    monkeypatch.setattr(placement, "Executor", Late)
    net = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    zero = Zero(net, stage=2, units=list(net), offload=Offload())
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    counted = []
    for _ in range(3):
        net(torch.ones(2, 8)).sum().backward()
        zero.clip_grad_norm_(1.0)
        optimizer.step()
        counted.append(zero.memory_bytes())
        pending = [group.update.pending for unit in zero.units for group in unit.groups]
        assert pending == [len(counted) > 1] * 3  # the first step makes states, whose bytes nobody knows before
        optimizer.zero_grad()
    assert counted[0] == counted[1] == counted[2]
    numel = sum(param.numel() for param in net.parameters())
    assert counted[0]["host_optimizer"] == 2 * 4 * numel + 4 * len(list(net.parameters()))
