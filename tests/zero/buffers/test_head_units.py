"""Embedding and head as units of their own: their gradients are reduced when they are there, and freed."""

import torch
from torch import nn

from nets import WIDTH, rows, set_values
from zeroshard.comm import NullCommunicator
from zeroshard.zero import Zero

NUM_TOKENS = 40


def test_the_heads_unsharded_gradient_is_gone_before_backward_is_over():
    class LM(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
            self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
            set_values(self)

        def forward(self, x, between):
            x = self.embed((x * 10).long().clamp(0, NUM_TOKENS - 1))
            for block in self.blocks:
                x = torch.tanh(block(x))
                x.register_hook(between)
            return self.head(x)

    def most_bytes(*ends):
        model, seen = LM(), []
        zero = Zero(model, 2, units=["blocks", *ends], comm=NullCommunicator(4))
        for _ in range(2):
            seen.clear()
            between = lambda _: seen.append(sum(g.grads.resident_bytes for g in zero._runtime.groups()))  # noqa: E731
            model(rows(0), between).square().mean().backward()
            zero.zero_grad()
        return seen[-1]  # when backward comes to the first block

    head_bytes = NUM_TOKENS * WIDTH * 4
    assert most_bytes() - most_bytes("embed", "head") >= head_bytes * 3 // 4 - 64
