"""Whatever a module takes and returns, the engine hears of its forward and backward."""

import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nets import NOTHING_RANDOM, Net, Turn, assert_every_stage_equals_one_process, linear, rows
from zeroshard.comm import NullCommunicator
from zeroshard.zero import Zero


@dataclasses.dataclass
class Data:
    hidden: Tensor
    note: str = "x"
    more: Any = None


class Plain:
    def __init__(self, hidden):
        self.hidden = hidden


class Slots:
    __slots__ = ("hidden",)

    def __init__(self, hidden):
        self.hidden = hidden


Named = namedtuple("Named", "hidden note")

WRAPPINGS = {
    "tuple": (lambda x: (None, x), lambda y: y[1]),
    "dict": (lambda x: {"a": [{"b": x}]}, lambda y: y["a"][0]["b"]),
    "namedtuple": (lambda x: Named(x, 3), lambda y: y.hidden),
    "dataclass": (Data, lambda y: y.hidden),
    "dataclass in a dataclass": (lambda x: Data(x * 0, more=[Data(x)]), lambda y: y.more[0].hidden),
    "object": (Plain, lambda y: y.hidden),
    "object in a list in an object": (lambda x: Plain([Plain(x)]), lambda y: y.hidden[0].hidden),
    "object with slots": (Slots, lambda y: y.hidden),
}


def wrapping(wrap):
    class Wrapping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return wrap(self.linear(x))

    return Wrapping


@pytest.mark.redundant
def test_a_units_output_may_be_changed_in_place_if_it_is_a_view():
    """As that of a linear layer is, with a bias and three dimensions."""

    def path(net, x):
        for block in net.blocks:
            x = torch.nn.functional.leaky_relu_(block(x[None]))[0]
        return x

    assert_every_stage_equals_one_process(lambda: Net(path=path))


@pytest.mark.redundant
def test_a_unit_may_return_a_view_of_its_input_that_is_changed_in_place():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            return x[: len(x) // 2], self.linear(x * 1)

    def path(net, x):
        for block in net.blocks:
            x = x * 2
            half, y = block(x)
            half.mul_(3)
            x = torch.tanh(y) + x
        return x

    assert_every_stage_equals_one_process(lambda: Net(block=Half, path=path))


@pytest.mark.redundant(but=["dataclass in a dataclass"])
@pytest.mark.parametrize("name", WRAPPINGS)
def test_units_and_models_may_return_any_structure(name):
    wrap, unwrap = WRAPPINGS[name]

    class Model(Net):
        def forward(self, x, rev):
            return wrap(super().forward(x, rev=rev))

    def path(net, x, rev=False):
        for block in reversed(net.blocks) if rev else net.blocks:
            x = torch.tanh(unwrap(block(x)))
        return x

    def take_turn(turn: Turn) -> None:
        unwrap(turn.model(rows(turn.rank, turn.step), turn.step % 2 == 1)).square().mean().backward()

    assert_every_stage_equals_one_process(lambda: Model(block=wrapping(wrap), path=path), take_turn)


class Two(nn.Module):
    """Takes two tensors, of which one meets a weight and the other comes straight through."""

    def __init__(self):
        super().__init__()
        self.up, self.down = linear(), linear()

    def forward(self, x, *, y):
        return x + self.down(torch.tanh(self.up(y)))


@pytest.mark.redundant
def test_a_unit_may_take_several_tensors_by_keyword():
    def path(net, x):
        y = x * 2
        for block in net.blocks:
            x, y = block(x, y=y), x
        return x

    assert_every_stage_equals_one_process(lambda: Net(block=Two, path=path))


@pytest.mark.redundant
def test_a_parameter_may_be_given_to_a_unit_as_an_argument():
    def build() -> Net:
        def path(net, x):
            for block in net.blocks:
                x = block(x, y=net.shared)
            return x

        net = Net(block=Two, path=path)
        net.shared = nn.Parameter(torch.ones(4, 6))
        return net

    assert_every_stage_equals_one_process(build)


def test_hooks_do_not_pile_up_on_a_tensor_that_lives_on():
    net = Net(block=Two, path=lambda net, x: net.blocks[0](x, y=net.shared))
    net.shared = nn.Parameter(torch.ones(4, 6))
    Zero(net, comm=NullCommunicator(2))
    x = rows(0).requires_grad_()
    for _ in range(3):
        net(x).sum().backward()
    assert not x._backward_hooks
    assert not net.shared._backward_hooks


class Through(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, skip):
        return x if skip else self.linear(x)


def test_a_unit_that_is_called_several_times_may_return_its_input_in_some():
    def path(net, x):
        for block in net.blocks:
            for skip in (False, True, True, False):
                x = block(x, skip)
        return x

    assert_every_stage_equals_one_process(lambda: Net(2, Through, path))


@pytest.mark.redundant
def test_a_unit_may_take_what_needs_no_gradient_and_return_its_input():
    def path(net, x, skip=False):
        x = net.blocks[0](x.detach(), False)
        return net.blocks[1](x, skip)

    def take_turn(turn: Turn) -> None:
        turn.loss(skip=turn.step == 1).backward()

    assert_every_stage_equals_one_process(lambda: Net(2, Through, path), take_turn, num_steps=3)


@pytest.mark.redundant
def test_outputs_that_the_loss_does_not_use_are_no_matter():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, x):
            return self.a(x), self.b(x)

    def path(net, x, which=0):
        for block in net.blocks:
            x = torch.tanh(block(x)[which])
        return x

    def take_turn(turn: Turn) -> None:
        turn.loss(which=(turn.rank + turn.step) % 2).backward()

    assert_every_stage_equals_one_process(lambda: Net(block=Branches, path=path), take_turn)


@pytest.mark.redundant
def test_units_may_be_inside_units():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.own = linear(), linear()

        def forward(self, x):
            return self.own(torch.tanh(self.inner(x)))

    def units(net):
        return [unit for block in net.blocks for unit in (block, block.inner)]

    assert_every_stage_equals_one_process(lambda: Net(block=Outer), zero_kwargs={"units": units})


@pytest.mark.redundant
def test_reentrant_recomputation_with_several_inputs_reduces_each_unit_once():
    def path(net, x):
        y = x * 2
        for block in net.blocks:
            x = checkpoint(lambda x, y, block=block: block(x, y=y), x, y, use_reentrant=True, **NOTHING_RANDOM)
        return x

    assert_every_stage_equals_one_process(lambda: Net(block=Two, path=path))


class Cache:
    """Keys and values of all blocks so far, as `transformers` hands them on from block to block."""

    def __init__(self):
        self.layers = []


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = linear(), linear()

    def forward(self, x, cache=None):
        if cache is not None:
            cache.layers.append([self.keys(x), self.values(x)])
        return x + torch.tanh(self.keys(x) * self.values(x))


def with_a_cache(net, x):
    cache = Cache()
    for block in net.blocks:
        x = block(x, cache)
    return x + 0.1 * sum(keys * values for keys, values in cache.layers)


def test_a_cache_that_goes_through_every_block_costs_a_hook_for_each_tensor(monkeypatch):
    """And not one for each tensor and block: 65 + 64 at 32 blocks, which were 1,121."""
    hooked = []
    original = Tensor.register_hook

    def count(self, hook):
        hooked.append(self)
        return original(self, hook)

    net = Net(8, block=Attends, path=with_a_cache)
    Zero(net, comm=NullCommunicator(2))
    monkeypatch.setattr(Tensor, "register_hook", count)
    net(rows(0)).sum().backward()
    assert len(hooked) == len({id(tensor) for tensor in hooked}) <= 2 * 8 + 2 * 8 + 2


@pytest.mark.redundant
def test_a_cache_that_goes_through_every_block_changes_nothing():
    assert_every_stage_equals_one_process(lambda: Net(block=Attends, path=with_a_cache))
