"""Accounts of memory do not make a step wait for the host's updates."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from zeroshard.zero import Offload, Zero
from zeroshard.zero.offload import placement
from zeroshard.zero.offload.disk import extent_bytes
from zeroshard.zero.offload.executor import Executor


class Late(Executor):
    """Runs an update when somebody waits for it, and no sooner."""

    def _begin(self, jobs):
        self.left = list(jobs)

    def wait(self, update):
        while update.pending:
            job, run = self.left.pop(0)
            job.end(self._run(job, run))


@pytest.mark.redundant
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


def test_state_in_a_file_is_accounted_for_and_none_of_it_is_in_memory(tmp_path):
    net = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    zero = Zero(net, stage=2, units=list(net), offload=Offload("disk", "disk", path=tmp_path / "folder"))
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(2):
        net(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert len(optimizer.state) == len(list(net.parameters()))  # and the step is complete
        found = zero.memory_bytes()
        assert found["disk_optimizer"] == 8 * sum(param.numel() for param in net.parameters())
    num_params, numel = len(list(net.parameters())), sum(param.numel() for param in net.parameters())
    assert (found["disk_master"], found["disk_optimizer"]) == (4 * numel, 8 * numel)
    assert (found.get("host_master", 0), found["host_optimizer"]) == (0, 4 * num_params)
    [file] = (tmp_path / "folder").glob("rank-*")
    per_unit = extent_bytes([(32 * 33, torch.float32)]) + extent_bytes(
        [(numel, torch.float32) for numel in (1024, 32) * 2]
    )
    assert file.stat().st_size == 4 * per_unit
    assert found["host_slots"] == 3 * per_unit
    start = [zero.pieces(optimizer)[0], *optimizer.state[zero.pieces(optimizer)[0]].values()]
    mapped = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line
    ]
    spans = [range(int(low, 16), int(high, 16)) for low, high in mapped]
    assert [any(tensor.data_ptr() in span for span in spans) for tensor in start] == [
        tensor.dim() > 0 for tensor in start
    ]
    del zero, net, optimizer, start
    deadline = time.monotonic() + 600
    while file.exists() and time.monotonic() < deadline:  # until the thread of the update lets go of the engine
        gc.collect()
        time.sleep(0.01)
    assert not file.exists()
