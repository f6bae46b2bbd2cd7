"""Embedding and head as units of their own: their gradients are reduced as soon as they are there, and freed."""

import pytest
import torch
from torch import nn

from nets import WIDTH, rows, set_values
from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.traffic import messages
from zeroshard.zero import STAGES, Zero

NUM_TOKENS = 40


class LM(nn.Module):
    """An embedding, blocks, and a head, which may be one matrix with the embedding."""

    def __init__(self, *, tied=False):
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        set_values(self)
        self.between = lambda x: x

    def forward(self, x):
        x = self.embed((x * 10).long().clamp(0, NUM_TOKENS - 1))
        for block in self.blocks:
            x = self.between(torch.tanh(block(x)))
        return self.head(self.norm(x))


def with_head(model):
    return [model.embed, *model.blocks, model.head]


def test_what_is_tied_stays_in_the_root():
    zero = Zero(LM(tied=True), 3, units=["embed", "blocks", "head"], comm=NullCommunicator(2))
    assert [unit.name for unit in zero._runtime.all_units()] == ["root", *(f"blocks.{i}" for i in range(4))]


@pytest.mark.parametrize("stage", STAGES)
def test_the_heads_gradient_is_reduced_first_and_all_is_sent_as_predicted(stage):
    model = LM()
    planned = messages(buffers_of(model, 2, with_head(model)), STAGES[stage])
    observed = ObservedCommunicator(NullCommunicator(2))
    zero = Zero(model, stage, units=with_head(model), comm=observed)
    optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    for step in range(3):
        observed.drain()
        model(rows(0, step)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    sent = [(r.op, r.num_bytes, r.label) for r in observed.records if r.label != CONTROL]
    assert sent == [(m.op, m.num_bytes, f"{m.buffer}/{m.phase}") for m in planned]
    reduced = [label for _, _, label in sent if label.endswith("/grads")]
    assert reduced == [f"{name}/grads" for name in ("head", *(f"blocks.{i}" for i in (3, 2, 1, 0)), "embed", "root")]


def test_the_heads_unsharded_gradient_is_gone_before_backward_is_over():
    def most_bytes(units_of):
        model, seen = LM(), []
        zero = Zero(model, 2, units=units_of(model), comm=NullCommunicator(4))

        def between(x):
            x.register_hook(lambda _: seen.append(sum(g.grads.resident_bytes for g in zero._runtime.groups())))
            return x

        model.between = between
        for _ in range(2):
            seen.clear()
            model(rows(0)).square().mean().backward()
            zero.zero_grad()
        return seen[-1]  # when backward comes to the first block

    head_bytes = NUM_TOKENS * WIDTH * 4
    assert most_bytes(lambda model: list(model.blocks)) - most_bytes(with_head) >= head_bytes * 3 // 4 - 64
