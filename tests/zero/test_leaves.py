"""The same bits on any number of ranks: `Zero(..., leaves=)`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from zeroshard import MixedPrecision, Zero
from zeroshard.comm import run_threads

LEAVES = 8
STEPS = 3


class Model(nn.Module):
    """Blocks, a tied matrix, a parameter of one element and an odd number of elements in all."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(13, 24, dtype=dtype)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 31, dtype=dtype), nn.Tanh(), nn.Linear(31, 24, dtype=dtype)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(1, dtype=dtype))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(
            (x @ self.embed.weight.T * self.scale)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )


def contiguous(rank, world_size, step):
    each = LEAVES // world_size
    return range(rank * each, (rank + 1) * each)


def strided(rank, world_size, step):
    return range(rank, LEAVES, world_size)


def shuffled(rank, world_size, step):
    order = torch.randperm(LEAVES, generator=torch.Generator().manual_seed(step)).tolist()
    return order[rank::world_size]


def train(
    world_size,
    stage,
    optimizer_cls=torch.optim.AdamW,
    dealt=contiguous,
    clip="ours",
    precision=None,
    dtype=None,
    **kwargs,
):
    """Losses by leaf, norms, weights and the optimizer's whole state."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(13, (STEPS, LEAVES, 2, 9), generator=generator)

    start = Model(dtype or torch.float32)

    def on_rank(comm):
        model = copy.deepcopy(start)  # threads share one generator
        zero = Zero(model, stage, model.blocks, comm, precision, leaves=LEAVES, **kwargs)
        params = [p for p in model.parameters() if p.ndim == 2] if optimizer_cls is torch.optim.Muon else None
        optimizer = zero.optimizer(optimizer_cls, params, lr=0.05)
        losses, norms = {}, []
        for step in range(STEPS):
            mine = list(dealt(comm.rank, comm.world_size, step))
            for place, leaf in enumerate(mine):
                with zero.micro_batch(last=place == len(mine) - 1):
                    loss = model(tokens[step, leaf])
                    (loss / len(mine)).backward()
                losses[step, leaf] = loss.item()
            if clip == "ours":
                norms.append(float(zero.clip_grad_norm_(0.5)))
            else:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
        return losses, norms, zero.state_dict(), zero.optim_state_dict()

    results = run_threads(on_rank, world_size)
    losses = {key: value for result in results for key, value in result[0].items()}
    assert all(result[1] == results[0][1] for result in results)
    return losses, *results[0][1:]


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    for name, weight in one[2].items():
        assert torch.equal(weight, other[2][name]), name
    assert one[3]["param_groups"] == other[3]["param_groups"]
    for index, kinds in one[3]["state"].items():
        for kind, value in kinds.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[3]["state"][index][kind])), (index, kind)


@pytest.fixture(scope="module")
def one_rank():
    return train(1, 0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_bits_are_those_of_one_rank(stage, world_size, one_rank):
    assert_same(train(world_size, stage), one_rank)


@pytest.mark.parametrize("dealt", [strided, shuffled])
@pytest.mark.parametrize(("stage", "world_size"), [(0, 2), (1, 4), (2, 1), (3, 2)])
def test_it_does_not_matter_which_rank_computes_which_micro_batch(dealt, stage, world_size, one_rank):
    assert_same(train(world_size, stage, dealt=dealt), one_rank)


@pytest.mark.parametrize(
    ("optimizer_cls", "stage"),
    [(torch.optim.SGD, 1), (torch.optim.Muon, 3), (torch.optim.Muon, 0), (torch.optim.Adafactor, 2)],
)
def test_other_optimizers(optimizer_cls, stage):
    one = train(1, stage, optimizer_cls)
    for world_size in (2, 8):
        assert_same(train(world_size, stage, optimizer_cls), one)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize(
    "precision",
    [MixedPrecision(torch.bfloat16), MixedPrecision(torch.bfloat16, torch.bfloat16)],
    ids=["bf16", "bf16-reduced"],
)
def test_narrower_dtypes(stage, precision):
    one = train(1, stage, precision=precision)
    for world_size in (2, 8):
        assert_same(train(world_size, stage, precision=precision), one)


def test_float64():
    assert_same(train(4, 2, dtype=torch.float64), train(1, 1, dtype=torch.float64))


def test_torch_own_clipping():
    one = train(1, 0, clip="torch")
    assert_same(train(2, 3, clip="torch"), one)
    assert_same(train(4, 1, clip="torch"), one)
