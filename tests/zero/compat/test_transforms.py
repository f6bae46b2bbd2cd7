"""`torch.func` over a model under an engine gives what it gives in one process, or raises a line; it trains nothing."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from zeroshard import Zero
from zeroshard.comm import run_threads

X = torch.arange(8.0).view(2, 4) / 8
torch.manual_seed(0)
INITIAL = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _model():
    return copy.deepcopy(INITIAL)


def _step(model, optim):
    model(X).square().sum().backward()
    optim.step()
    optim.zero_grad()


def _grads(model):
    params = dict(model.named_parameters())
    return grad(lambda params: functional_call(model, params, (X,)).square().sum())(params)


def _mapped(model):
    return {"out": vmap(model)(X)}


def _alone(transform, steps):
    model = _model()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        _step(model, optim)
    found = {name: value.detach() for name, value in transform(model).items()}
    _step(model, optim)
    return found, model(X).detach()


def _sharded(comm, stage, transform, steps):
    model = _model()
    zero = Zero(model, stage=stage, comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(steps):
        _step(model, optim)
    with zero.full_params():
        found = {name: value.detach() for name, value in transform(model).items()}
    _step(model, optim)
    return found, model(X).detach()


@pytest.mark.redundant(but=["3-0-_mapped"])
@pytest.mark.parametrize("transform", [_grads, _mapped])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_transform_is_that_of_one_process_and_the_next_step_too(stage, steps, transform):
    expected, after = _alone(transform, steps)
    for found, sharded_after in run_threads(lambda comm: _sharded(comm, stage, transform, steps), 2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)
        torch.testing.assert_close(sharded_after, after)


@pytest.mark.parametrize("transform", [_grads, _mapped])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_that_would_have_to_be_gathered_in_it_are_refused_in_a_line(stage, transform):
    def train(comm):
        model = _model()
        zero = Zero(model, stage=stage, comm=comm)
        _step(model, zero.optimizer(torch.optim.SGD, lr=0.1))
        with pytest.raises(RuntimeError, match=r"torch\.func .*; call the transform inside zero\.full_params\(\)"):
            transform(model)

    run_threads(train, 2)
