"""A small model that replicas train by local steps, for the tests of outer steps, of checkpoints and of refusals."""

import pytest
import torch
from torch import Tensor, nn

from zeroshard.zero import LocalSteps, Zero

STAGES = (0, 1, 2, 3)
AVERAGING = LocalSteps(every=1, outer_lr=1.0, outer_momentum=0.0)
DILOCO = LocalSteps(every=3, outer_lr=0.7, outer_momentum=0.9)
FRAGMENTS = LocalSteps(every=4, outer_lr=0.4, outer_momentum=0.9, fragments=2)
SOAK = pytest.mark.soak
QUANTISED = LocalSteps(every=4, fragments=2, wire="int4", block=32)
ALL_KINDS = pytest.mark.parametrize(
    "settings", [DILOCO, FRAGMENTS, QUANTISED], ids=["diloco", "fragments", "quantised"]
)


class Net(nn.Module):
    """Two units and a root."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7, bias=False)])
        self.last = nn.Linear(7, 3)
        numbers = torch.Generator().manual_seed(seed)  # thread ranks share torch's own
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(0.3 * torch.randn(param.shape, generator=numbers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.last(x)


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    mine = rows[rank::world_size]
    return (model(mine) - mine[:, :3].sin()).square().mean()


def engine_of(comm, stage, settings, shard_size=1, cls=torch.optim.AdamW, lr=0.03, **kwargs):
    net = Net(comm.rank)  # the first replica's weights are everybody's
    zero = Zero(net, stage, comm=comm, shard_size=shard_size, local_steps=settings, **kwargs)
    return net, zero, zero.optimizer(cls, lr=lr)


def train(comm, engine, steps):
    net, zero, optim = engine
    outer_steps = []
    for step in steps:
        loss_of(net, step, comm.rank, comm.world_size).backward()
        optim.step()
        optim.zero_grad()
        outer_steps += zero.local_steps.step()
    return outer_steps


def near(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-5, atol=2e-6)


def both(zero):
    with zero.local_steps.global_weights():
        global_weights = zero.state_dict()
    return global_weights, zero.state_dict()
