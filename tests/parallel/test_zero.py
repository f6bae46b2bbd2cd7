from dataclasses import replace

import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.parallel import STRATEGIES, Setup, ZeroStrategy, build_strategy


def _setup(comm, seed=0, **changes):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 1))
    values = {
        "model": model,
        "units": [model[0]],
        "comm": comm,
        "optimizer_cls": torch.optim.AdamW,
        "param_groups": lambda module: [{"params": list(module.parameters())}],
        "optimizer_kwargs": {"lr": 0.01},
    }
    return Setup(**{**values, **changes})


def _train(strategy, data, num_steps=3):
    """Two micro-batches a step, clipped; the norms."""
    norms = []
    for _ in range(num_steps):
        for index, micro_batch in enumerate(data):
            with strategy.micro_batch(last=index == len(data) - 1):
                (strategy.model(micro_batch).square().mean() / len(data)).backward()
        norms.append(float(strategy.clip_grad_norm_(0.05)))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("name", [name for name, entry in STRATEGIES.items() if not entry.over_torch])
def test_every_stage_behind_the_interface_trains_as_ddp_in_one_process(name):
    data = torch.randn(2, 4, 6)
    theirs = build_strategy("ddp", _setup(LocalCommunicator()))
    their_norms = _train(theirs, data)
    ours = build_strategy(name, _setup(LocalCommunicator()))
    assert _train(ours, data) == pytest.approx(their_norms, rel=1e-5)
    for key, tensor in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], tensor, rtol=1e-5, atol=1e-6)

    # made before the threads start, which share one random generator; all start from rank 0's weights
    setups = [_setup(None, seed=rank) for rank in range(2)]

    def rank_main(comm):
        strategy = build_strategy(name, replace(setups[comm.rank], comm=comm))
        return _train(strategy, data[:, 2 * comm.rank : 2 * comm.rank + 2]), strategy.state_dict()

    for norms, state in run_threads(rank_main, 2):
        assert norms == pytest.approx(their_norms, rel=1e-5)
        for key, tensor in theirs.state_dict().items():
            torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6)


def test_bfloat16_keeps_a_float32_master():
    strategy = build_strategy("zero2", _setup(LocalCommunicator(), compute_dtype=torch.bfloat16))
    assert isinstance(strategy, ZeroStrategy)
    assert {param.dtype for param in strategy.model.parameters()} == {torch.bfloat16}
    assert {shard.tensor.dtype for shard in strategy.named_shards()} == {torch.float32}


def test_groups_are_made_of_the_parameters_that_the_engine_made():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    setup = _setup(LocalCommunicator(), model=model, units=list(model), init=lambda name, param: param.fill_(1.0))
    strategy = build_strategy("zero3", setup)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for tensor in strategy.state_dict().values())
    strategy.model(torch.ones(1, 3)).sum().backward()
    strategy.optimizer.step()
    assert not any(torch.equal(tensor, torch.ones_like(tensor)) for tensor in strategy.state_dict().values())
