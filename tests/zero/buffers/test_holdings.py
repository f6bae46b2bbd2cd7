"""Whose each piece of an engine's memory is, between steps and in the middle of one."""

from collections import Counter

import pytest
import torch
from torch import nn

from zeroshard.comm import NullCommunicator
from zeroshard.zero import STAGES, MixedPrecision, Zero

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def held_bytes(holdings):
    """Bytes by category; a storage that several tensors share counts once."""
    storages = {}
    for category, _, tensor in holdings:
        storage = tensor.untyped_storage()
        storages.setdefault(storage._cdata, (category, storage.nbytes()))
    total = Counter()
    for category, num_bytes in storages.values():
        total[category] += num_bytes
    return dict(+total)


def _engine(stage, world_size=4, precision=None, **kwargs):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    zero = Zero(net, stage, units=list(net), comm=NullCommunicator(world_size), precision=precision, **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


@pytest.mark.redundant(but=["1-1-bf16"])
@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_between_steps_the_storages_hold_what_the_engine_counts(stage, world_size, precision):
    zero, optim = _engine(stage, world_size, precision)
    for _ in range(2):
        zero.model(torch.ones(2, 8)).sum().backward()
        for moment in (lambda: None, optim.step):
            moment()
            counted = {name: n for name, n in zero.memory_bytes().items() if n}
            assert held_bytes(zero.holdings()) == counted
        optim.zero_grad()


def test_unsharded_weights_are_unit_buffers_in_use_and_prefetched_before():
    zero, _ = _engine(3)
    shard = 4 * 18  # 72 elements over 4 ranks, in fp32
    seen = []
    zero.model[1][1].register_forward_hook(lambda *_: seen.append(held_bytes(zero.holdings())))
    zero.model(torch.ones(2, 8))
    # Unit 1 runs, 2 is on its way, 0 has been freed.
    assert seen == [{"params": 3 * shard, "unit_buffers": 4 * shard, "prefetch": 4 * shard}]


def test_unsharded_gradients_are_unit_buffers_until_they_are_reduced():
    zero, _ = _engine(2)
    full = 4 * 72
    loss = zero.model(torch.ones(2, 8)).sum()
    seen = []
    zero.model[1][0].weight.register_hook(lambda _: seen.append(held_bytes(zero.holdings())))
    loss.backward()
    assert seen[0]["unit_buffers"] >= full
    assert held_bytes(zero.holdings()) == {"params": 3 * full, "grads": 3 * full // 4}
