"""A call that every rank must make is in the log that ranks compare, before any collective of it, at each stage."""

import contextlib

import pytest
import torch
from torch import nn

import zeroshard
from nets import Net, rows
from zeroshard import ShardedOptimizer, Zero
from zeroshard.comm import NullCommunicator, ObservedCommunicator
from zeroshard.comm.wrappers.sentinel import SentinelCommunicator
from zeroshard.zero.local_steps.settings import LocalSteps


class Board:
    """Nobody looks at it."""

    def post(self, key, value):
        """Nothing."""

    def read(self, key):
        """Nothing."""


@pytest.fixture
def comm():
    """Two ranks, of which there is one, under a watch and a further wrapper."""
    watched = SentinelCommunicator(NullCommunicator(2), Board(), lambda line, found_here: None)
    yield ObservedCommunicator(watched)
    watched.close()


def noted(comm, call):
    """The first operation in the log that comes from ``call``, which may fail later: there is no other rank."""
    log = comm.inner._watch.log
    before = log.count
    with contextlib.suppress(OSError, ValueError, RuntimeError, LookupError):
        call()
    return next((line for number, _, line in log.recent() if number == before), "nothing")


CALLS = {
    "zeroshard.save": lambda zero, optim, path: zeroshard.save(path, zero, step=1),
    "zeroshard.load": lambda zero, optim, path: zeroshard.load(path, zero),
    "Zero.state_dict": lambda zero, optim, path: zero.state_dict(),
    "Zero.load_state_dict": lambda zero, optim, path: zero.load_state_dict(Net().state_dict()),
    "Zero.optim_state_dict": lambda zero, optim, path: zero.optim_state_dict(),
    "SGD.load_state_dict": lambda zero, optim, path: optim.load_state_dict({}),
    "Zero.full_params": lambda zero, optim, path: zero.full_params(),
    "Zero.full_grads": lambda zero, optim, path: zero.full_grads(),
    "Zero.optimizer": lambda zero, optim, path: zero.optimizer(torch.optim.SGD, lr=0.1),
    "Zero.clip_grad_norm_": lambda zero, optim, path: zero.clip_grad_norm_(1.0),
    "Zero.restage": lambda zero, optim, path: zero.restage(1),
    "Zero.ema": lambda zero, optim, path: zero.ema(),
    "Zero.remove": lambda zero, optim, path: zero.remove(),
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_call_of_an_engine_is_noted_first(comm, stage, tmp_path):
    net = Net()
    zero = Zero(net, stage, comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    net(rows(0)).sum().backward()
    found = {name: noted(comm, lambda call=call: call(zero, optim, tmp_path / "save")) for name, call in CALLS.items()}
    assert found == {name: f"the call {name}" + "(1.0, 2.0, False)" * ("clip" in name) for name in CALLS}


def test_so_is_each_call_of_an_average_of_outer_steps_and_of_a_sharded_optimizer(comm):
    ema = Zero(Net(), 2, comm=comm).ema()
    outer = Zero(Net(), 2, comm=comm, shard_size=1, local_steps=LocalSteps(every=2)).local_steps
    sharded = ShardedOptimizer(nn.Linear(2, 2).parameters(), torch.optim.SGD, comm=comm, lr=0.1)
    more = {"params": [nn.Parameter(torch.zeros(2))]}
    calls = {
        "Ema.update": ema.update,
        "Ema.weights": lambda: ema.weights().__enter__(),
        "OuterSteps.step": outer.step,
        "OuterSteps.outer_step": outer.outer_step,
        "OuterSteps.global_weights": outer.global_weights,
        "ShardedOptimizer.add_param_group": lambda: sharded.add_param_group(more),
        "ShardedOptimizer.consolidate_state_dict": sharded.consolidate_state_dict,
        "ShardedOptimizer.load_state_dict": lambda: sharded.load_state_dict({"param_groups": []}),
    }
    found = {name: noted(comm, call) for name, call in calls.items()}
    assert found == {name: f"the call {name}" for name in calls}
