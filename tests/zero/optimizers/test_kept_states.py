"""Saved states are loaded only into an optimizer that keeps such states: others are refused before anything changes."""

import copy
from itertools import permutations

import pytest
import torch
from torch import nn, optim

import zeroshard
from same_results import Saved
from zeroshard import Zero
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.host.errors import UserError
from zeroshard.parallel import Setup, build_strategy

OPTIMIZERS = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD with momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "Adam": (optim.Adam, {"lr": 0.01}),
    "AdamW fused": (optim.AdamW, {"lr": 0.01, "fused": True}),
    "Adafactor": (optim.Adafactor, {"lr": 0.01}),
}
# Loads that mean something: states of the same names and meaning, or settings that are restored with the states.
FIT = {("Adam", "AdamW fused"), ("AdamW fused", "Adam"), ("SGD with momentum", "SGD"), ("SGD", "SGD with momentum")}


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 11), nn.Tanh(), nn.Linear(11, 8))


def _rows(step):
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def _steps(net, optimizer, comm, steps):
    for step in steps:
        optimizer.zero_grad()
        net(_rows(step).chunk(comm.world_size)[comm.rank]).square().mean().backward()
        optimizer.step()


def _made(comm, stage, name):
    net = _net()
    zero = Zero(net, stage=stage, comm=comm)
    cls, kwargs = OPTIMIZERS[name]
    return net, zero, zero.optimizer(cls, **kwargs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of each optimizer after two steps on two ranks at stage 1: its folder, and the weights."""
    folder = tmp_path_factory.mktemp("saved")

    def save(comm, name):
        net, zero, optimizer = _made(comm, 1, name)
        _steps(net, optimizer, comm, range(2))
        zeroshard.save(folder / name.replace(" ", "-"), zero, step=2)
        _steps(net, optimizer, comm, range(2, 4))
        return zero.state_dict()

    return folder, {name: run_threads(lambda comm, name=name: save(comm, name), 2)[0] for name in OPTIMIZERS}


@pytest.mark.redundant(but=["SGD-AdamW fused"])
@pytest.mark.parametrize(("theirs", "ours"), list(permutations(OPTIMIZERS, 2)))
def test_a_checkpoint_of_another_optimizer_is_refused_before_anything_changes(saved, theirs, ours):
    folder, continued = saved

    def load(comm):
        net, zero, optimizer = _made(comm, 3, ours)
        before, lr = zero.state_dict(), optimizer.param_groups[0]["lr"]
        try:
            zeroshard.load(folder / theirs.replace(" ", "-"), zero)
        except UserError as error:
            assert all(torch.equal(value, before[name]) for name, value in zero.state_dict().items())
            assert optimizer.param_groups[0]["lr"] == lr
            return str(error)
        _steps(net, optimizer, comm, range(2, 4))
        return zero.state_dict()

    results = run_threads(load, 2)
    if (theirs, ours) in FIT:
        assert isinstance(results[0], dict)
        if "SGD" in ours:  # the settings that were saved go with the states
            assert all(torch.allclose(value, continued[theirs][name]) for name, value in results[0].items())
        return
    assert results[0] == results[1]
    assert "\n" not in results[0]
    assert f"{OPTIMIZERS[ours][0].__name__} keeps " in results[0]
    assert "another optimizer; load" in results[0]


def _strategy(name, optimizer="AdamW fused"):
    cls, kwargs = OPTIMIZERS[optimizer]
    setup = Setup(_net(), [], LocalCommunicator(), cls, lambda net: [{"params": list(net.parameters())}], kwargs)
    return build_strategy(name, setup)


@pytest.fixture(params=["zero1", "zero3", "ddp"])
def trained(request):
    """A strategy on one rank after two steps with fused AdamW, and a reader of its state."""
    strategy = _strategy(request.param)
    for step in range(2):
        strategy.optimizer.zero_grad()
        strategy.model(_rows(step)).square().mean().backward()
        strategy.optimizer.step()
    return request.param, Saved([list(strategy.named_shards())])


WRONG = {
    "a scalar in place of a tensor": ("exp_avg", torch.tensor(0.0)),
    "too short": ("exp_avg", torch.zeros(5)),
    "too long": ("exp_avg_sq", torch.zeros(12, 8)),
    "transposed": ("exp_avg", torch.zeros(8, 11)),
    "whole numbers": ("exp_avg", torch.zeros(11, 8, dtype=torch.int64)),
    "complex": ("exp_avg_sq", torch.zeros(11, 8, dtype=torch.complex64)),
    "a tensor in place of a number": ("step", torch.zeros(11, 8)),
    "several numbers": ("step", torch.zeros(2)),
    "a whole number": ("step", torch.tensor(3)),
    "not one of its states": ("momentum_buffer", torch.zeros(11, 8)),
    "an average of another shape": ("ema", torch.zeros(4)),
}


@pytest.mark.redundant(but=["ddp-a whole number"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_of_another_shape_or_dtype_is_refused_before_anything_changes(trained, wrong):
    name, reader = trained
    kind, tensor = WRONG[wrong]
    reader.full["0.weight", kind] = tensor
    strategy = _strategy(name)
    before = copy.deepcopy(strategy.state_dict())
    with pytest.raises(UserError, match=f"^0.weight: .*{kind}.*; load"):
        strategy.load_named_shards(reader)
    assert all(torch.equal(value, before[key]) for key, value in strategy.state_dict().items())
    assert not strategy.optimizer.state


@pytest.mark.redundant
@pytest.mark.parametrize("kind", ["exp_avg", "exp_avg_sq", "step"])
def test_a_parameter_with_some_of_its_states_is_refused(trained, kind):
    name, reader = trained
    del reader.full["2.bias", kind]
    with pytest.raises(UserError, match=r"^2.bias: AdamW keeps exp_avg, exp_avg_sq and step, and saved are "):
        _strategy(name).load_named_shards(reader)


@pytest.mark.redundant
def test_a_parameter_without_states_begins_without_them(trained):
    """A parameter that had no gradient has none."""
    name, reader = trained
    for kind in ("exp_avg", "exp_avg_sq", "step"):
        del reader.full["2.bias", kind]
    strategy = _strategy(name)
    strategy.load_named_shards(reader)
    assert {shard.kind for shard in strategy.named_shards() if shard.name == "2.bias"} == {"param"}


def test_states_of_another_floating_dtype_are_converted(trained):
    name, reader = trained
    values = reader.full["0.weight", "exp_avg"]
    reader.full["0.weight", "exp_avg"] = values.double()
    reader.full["0.weight", "step"] = torch.tensor(2.0, dtype=torch.float16)
    strategy = _strategy(name)
    strategy.load_named_shards(reader)
    loaded = Saved([list(strategy.named_shards())]).full
    assert loaded["0.weight", "exp_avg"].equal(values)
    assert loaded["0.weight", "step"].dtype == torch.float32


class CountsSteps(optim.Optimizer):
    """SGD that keeps a Python number, and from its third step on an average of gradients."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 2:
                    state.setdefault("average", torch.zeros_like(param)).lerp_(param.grad, 0.5)
                param.sub_(param.grad, alpha=group["lr"])


@pytest.mark.redundant(but=["2"])
@pytest.mark.parametrize("num_steps", [1, 2, 6])
def test_a_class_may_begin_to_keep_a_state_later(num_steps):
    def make():
        net = _net()
        zero = Zero(net, stage=1, comm=LocalCommunicator())
        return net, zero, zero.optimizer(CountsSteps)

    net, zero, optimizer = make()
    _steps(net, optimizer, zero.comm, range(num_steps))
    reader = Saved([list(zero.named_shards())])
    again, loaded, other = make()
    loaded.load_named_shards(reader)
    assert all(type(other.state[piece]["count"]) is int for piece in loaded.pieces())
    for one, its in ((net, optimizer), (again, other)):
        _steps(one, its, zero.comm, range(num_steps, num_steps + 3))
    assert all(torch.equal(*pair) for pair in zip(net.parameters(), again.parameters(), strict=True))


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_optimizers_own_load_refuses_what_it_does_not_keep(stage):
    net = _net()
    zero = Zero(net, stage=stage, comm=LocalCommunicator())
    optimizer = zero.optimizer(optim.AdamW, lr=0.01)
    _steps(net, optimizer, zero.comm, range(2))
    good = zero.optim_state_dict()
    for kind, value in (("exp_avg", torch.zeros(())), ("exp_avg", torch.zeros(3)), ("step", torch.zeros(2))):
        state = copy.deepcopy(good)
        state["state"][0][kind] = value
        with pytest.raises(UserError, match=rf"^state_dict: {kind} of 0.weight has the shape .*, and AdamW keeps "):
            optimizer.load_state_dict(state)
    one = _net()
    momentum = optim.SGD(one.parameters(), 0.1, momentum=0.9)
    _steps(one, momentum, zero.comm, range(1))
    with pytest.raises(UserError, match=r"AdamW keeps exp_avg, exp_avg_sq and step of 0.weight, and saved are mom"):
        optimizer.load_state_dict(momentum.state_dict())
    optimizer.load_state_dict(good)


def test_a_sharded_optimizer_refuses_what_it_does_not_keep():
    net, one = _net(), _net()
    optimizer = zeroshard.ShardedOptimizer(net.parameters(), optim.AdamW, lr=0.01)
    momentum, adamw = optim.SGD(one.parameters(), 0.1, momentum=0.9), optim.AdamW(one.parameters())
    for its in (momentum, adamw):
        _steps(one, its, LocalCommunicator(), range(1))
    with pytest.raises(UserError, match=r"AdamW keeps .* of parameter 0, and saved are momentum_buffer"):
        optimizer.load_state_dict(momentum.state_dict())
    state = adamw.state_dict()
    state["state"][1]["exp_avg"] = torch.zeros(2)
    with pytest.raises(UserError, match=r"exp_avg of parameter 1 has the shape \(2,\), and AdamW keeps \(11,\)"):
        optimizer.load_state_dict(state)
    optimizer.load_state_dict(adamw.state_dict() | {"state": {}})
