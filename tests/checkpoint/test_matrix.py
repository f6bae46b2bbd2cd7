"""What any strategy saved in any world, every strategy loads in every world, to the bit.

The pairs are generated. Strategies meet in one set of gloo ranks a world size: each saves after two steps, and then
every save is loaded: with --soak by every strategy in every world, without it so often that every two of a strategy
that saves, its world, a strategy that loads and its world meet, and worlds are of three ranks at most.
"""

import functools
import os
from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from exactness import same_bits
from pairwise import cover
from same_results import contents
from soak import soaking
from zeroshard import checkpoint
from zeroshard.parallel import STRATEGIES, Setup, build_strategy

WORLD_SIZES = (1, 2, 3, 4) if soaking() else (1, 2, 3)
NAMES = sorted(STRATEGIES)
EMA_DECAY = 0.5


class Net(nn.Module):
    """Rows that no world divides, a one-element and a frozen parameter, and a buffer; two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return (self.scale * x + self.frozen.sum()).square().mean()


def build(comm, name, seed=0, optimizer_cls=torch.optim.AdamW, **kwargs):
    """A strategy over a net whose values follow from the seed."""
    torch.manual_seed(seed)
    model = Net()
    setup = Setup(
        model=model,
        units=list(model.blocks),
        comm=comm,
        optimizer_cls=optimizer_cls,
        param_groups=lambda module: [{"params": [p for p in module.parameters() if p.requires_grad]}],
        optimizer_kwargs={"lr": 0.02, **kwargs},
        ema_decay=EMA_DECAY,
    )
    return build_strategy(name, setup)


def take_steps(strategy, steps):
    """Losses' gradient norms of ``steps``, each on 12 rows that the ranks share out."""
    norms = []
    for step in steps:
        rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        strategy.model(rows.chunk(strategy.comm.world_size)[strategy.comm.rank]).backward()
        norms.append(float(strategy.clip_grad_norm_(0.5)))
        strategy.optimizer.step()
        strategy.ema.update()
        strategy.optimizer.zero_grad()
    return norms


def train_and_save(comm, folder):
    """On a rank: each strategy takes two steps, saves, and goes on for two more; the later norms by strategy."""
    norms = {}
    os.fsync = lambda descriptor: None  # in these ranks: what reaches the disk is for other tests
    for seed, name in enumerate(NAMES):  # other weights each, so that a load that does nothing is seen
        strategy = build(comm, name, seed)
        take_steps(strategy, range(2))
        checkpoint.save(Path(folder) / f"{name}-{comm.world_size}", strategy, step=2, extra={"by": name})
        norms[name] = (take_steps(strategy, range(2, 4)), strategy.state_dict())
    return norms


@functools.cache
def loads():
    """Who saved, where, who loads, where: all of them, or a cover of all pairs."""
    every = list(product(NAMES, WORLD_SIZES, NAMES, WORLD_SIZES))
    return every if soaking() else [every[place] for place in cover(every)]


def load_and_compare(comm, folder, pairs):
    """On a rank: of each pair a strategy loads a save into other weights; elements that it then has, by tensor.

    What it has is compared here, piece by piece: to the bit.
    """
    found = {}
    wholes = {source: contents(Path(folder) / source) for source in {source for _, source in pairs}}
    strategies = {name: build(comm, name, seed=len(NAMES)) for name in sorted({name for name, _ in pairs})}
    for name, source in pairs:
        strategy = strategies[name]
        assert checkpoint.load(Path(folder) / source, strategy)["by"] == source.rpartition("-")[0]
        whole, counts = wholes[source], Counter()
        for shard in strategy.named_shards():
            expected = whole[shard.name, shard.kind]
            assert shard.shape == tuple(expected.shape)
            assert shard.tensor.dtype == expected.dtype
            assert torch.equal(shard.tensor, expected.reshape(-1)[slice(*shard.interval)]), (name, source, shard.name)
            counts[shard.name, shard.kind] += shard.tensor.numel()
        found[name, source] = counts
    return found


def load_and_go_on(comm, folder):
    """On a rank: each strategy loads its own save and goes on; as of `train_and_save`."""
    norms = {}
    for name in NAMES:
        strategy = build(comm, name, seed=len(NAMES))
        checkpoint.load(Path(folder) / f"{name}-{comm.world_size}", strategy)
        norms[name] = (take_steps(strategy, range(2, 4)), strategy.state_dict())
    return norms


@pytest.fixture(scope="module")
def saved(gloo_ranks, tmp_path_factory):
    """The folder of every strategy's save in every world, and how each went on from there."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, {size: gloo_ranks(size).run(train_and_save, str(folder)) for size in WORLD_SIZES}


@pytest.mark.redundant(but=["3-1", "3-2"])
@pytest.mark.slow
@pytest.mark.parametrize("loaded_at", WORLD_SIZES)
@pytest.mark.parametrize("saved_at", WORLD_SIZES)
def test_every_strategy_loads_what_every_strategy_saved(gloo_ranks, saved, saved_at, loaded_at):
    folder, _ = saved
    pairs = [(name, f"{by}-{saved_at}") for by, size, name, at in loads() if (size, at) == (saved_at, loaded_at)]
    by_rank = gloo_ranks(loaded_at).run(load_and_compare, str(folder), pairs)
    assert pairs
    for name, source in pairs:
        numels = {key: tensor.numel() for key, tensor in contents(folder / source).items()}
        assert {kind for _, kind in numels} == {"param", "exp_avg", "exp_avg_sq", "step", "ema", "buffer"}
        assert sum((found[name, source] for found in by_rank), Counter()) == numels, (name, source)


@pytest.mark.redundant
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_in_its_own_world_a_strategy_goes_on_as_if_it_had_never_stopped(gloo_ranks, saved, world_size):
    folder, went_on = saved
    for before, after in zip(went_on[world_size], gloo_ranks(world_size).run(load_and_go_on, str(folder)), strict=True):
        for name in NAMES:
            assert after[name][0] == before[name][0], name
            assert same_bits(after[name][1], before[name][1])


def save_unstepped(comm, folder):
    """On a rank: what is saved before the first step, and by an optimizer that has no state, is loaded again."""
    for name in NAMES:
        for cls, steps in ((torch.optim.AdamW, 0), (torch.optim.SGD, 2)):
            path = Path(folder) / f"{name}-{cls.__name__}"
            strategy = build(comm, name, optimizer_cls=cls)
            take_steps(strategy, range(steps))
            checkpoint.save(path, strategy, step=steps)
            other = build(comm, NAMES[(NAMES.index(name) + 1) % len(NAMES)], seed=1, optimizer_cls=cls)
            checkpoint.load(path, other)
            assert same_bits(dict(other.state_dict()), dict(strategy.state_dict()))
            assert take_steps(other, range(2)) == pytest.approx(take_steps(strategy, range(2)), rel=1e-5)


def test_a_save_before_the_first_step_and_an_optimizer_without_state(gloo_ranks, tmp_path):
    gloo_ranks(2).run(save_unstepped, str(tmp_path))
    for entry in tmp_path.iterdir():
        assert {kind for _, kind in contents(entry)} == {"param", "ema", "buffer"}


def param_groups(comm, folder):
    for name in NAMES:
        strategy = build(comm, name, betas=(0.5, 0.75))
        strategy.optimizer.param_groups[0]["lr"] = 0.125
        checkpoint.save(Path(folder) / name, strategy, step=0)


@pytest.mark.redundant
def test_every_strategy_tells_its_param_groups_by_name(gloo_ranks, tmp_path):
    gloo_ranks(3).run(param_groups, str(tmp_path))
    expected = [name for name, param in Net().named_parameters() if param.requires_grad]
    for name in NAMES:
        (group,) = checkpoint.read_manifest(tmp_path / name).param_groups
        assert group["params"] == expected, name
        assert (group["lr"], group["betas"], group["weight_decay"]) == (0.125, [0.5, 0.75], 0.01)
