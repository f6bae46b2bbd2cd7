"""A model whose matrices travel in a wire format, its steps, and what two trainings are compared by."""

import copy

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from nets import NOTHING_RANDOM


class Net(nn.Module):
    """Matrices that travel in a wire format, norms and biases that do not, and a unit that is frozen.

    The last block is recomputed where ``recomputes``.
    """

    recomputes = False

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 96)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(96), nn.Linear(96, 100), nn.Tanh(), nn.Linear(100, 96)) for _ in range(3)
        )
        self.blocks[1].requires_grad_(False)

    def forward(self, x):
        x = self.embed(x)
        for index, block in enumerate(self.blocks):
            if index == 2 and self.recomputes:
                x = x + checkpoint(block, x, use_reentrant=False, **NOTHING_RANDOM)
            else:
                x = x + block(x)
        return x.float().square().mean()


def _drawn():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Net()


ORIGINAL = _drawn()  # before there are threads, which share a generator


def net(*, recomputes=False):
    made = copy.deepcopy(ORIGINAL)
    made.recomputes = recomputes
    return made


def batch(rank, step):
    return torch.randn(5, 48, generator=torch.Generator().manual_seed(1000 * step + rank))


def steps(zero, optimizer, numbers, num_micro=1):
    """Loss and norm of each step."""
    found = []
    for step in numbers:
        for micro in range(num_micro):
            with zero.micro_batch(last=micro == num_micro - 1):
                loss = zero.model(batch(zero.comm.rank, 10 * step + micro))
                loss.backward()
        found.append((loss.detach(), zero.clip_grad_norm_(1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return found
