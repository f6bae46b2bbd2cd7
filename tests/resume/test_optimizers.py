"""Checkpoints on disk of optimizers that keep whole tensors and factored states, across stages and world sizes."""

import pytest
import torch
from torch import nn

import zeroshard.checkpoint as checkpoint
from nets import Net, rows
from zeroshard.comm import run_threads
from zeroshard.zero import Zero


def _build(comm, stage, name):
    net = Net(2, lambda: nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 6))).double()
    zero = Zero(net, stage=stage, comm=comm)
    matrices = [param for param in net.parameters() if param.dim() == 2]
    others = [param for param in net.parameters() if param.dim() != 2]
    if name == "Muon":
        return zero, [zero.optimizer(torch.optim.Muon, matrices, lr=0.02), zero.optimizer(torch.optim.AdamW, others)]
    return zero, [zero.optimizer(torch.optim.Adafactor, lr=0.02)]


def _train(zero, optims, steps):
    for step in steps:
        zero.model(rows(0, step, torch.float64)).square().mean().backward()  # every rank's: any world takes these steps
        for optim in optims:
            optim.step()
        zero.zero_grad()


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
@pytest.mark.parametrize(
    ("wrote", "reads"),
    [((1, 3), (3, 2)), ((3, 2), (0, 1)), ((2, 3), (2, 3)), ((0, 2), (3, 6))],
)
def test_a_run_goes_on_at_another_stage_and_world_size(tmp_path, wrote, reads, name):
    path = tmp_path / "step-00000002"

    def write(comm):
        zero, optims = _build(comm, wrote[0], name)
        _train(zero, optims, range(2))
        checkpoint.save(path, zero, step=2)
        saved = zero.state_dict()
        _train(zero, optims, range(2, 4))
        return saved, zero.state_dict()

    def read(comm):
        zero, optims = _build(comm, reads[0], name)
        assert checkpoint.load(path, zero)["step"] == 2
        loaded = zero.state_dict()
        _train(zero, optims, range(2, 4))
        return loaded, zero.state_dict()

    saved, through = run_threads(write, wrote[1])[0]
    loaded, resumed = run_threads(read, reads[1])[-1]
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    for key, weight in through.items():
        torch.testing.assert_close(resumed[key], weight, rtol=0, atol=1e-12)
        assert wrote != reads or torch.equal(resumed[key], weight)
