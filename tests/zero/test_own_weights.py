"""Weights of a rank's own shard are read in the master, at stage 3: a gather neither writes nor needs its own slice."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from nets import WIDTH, Net, assert_every_stage_equals_one_process, rows
from zeroshard.comm import BlockingCommunicator, NullCommunicator, leaves_own_slice, run_threads
from zeroshard.zero import MixedPrecision, Zero, precision
from zeroshard.zero.buffers import own_weights
from zeroshard.zero.buffers.own_weights import OwnWeights


@pytest.fixture(autouse=True)
def _the_own_slice_is_nan(monkeypatch):
    """Whoever reads the slice that a gather leaves out computes NaN."""
    copy_cut = OwnWeights.copy_cut

    def poisoned(self, full):
        full[self._start : self._stop].fill_(float("nan"))
        copy_cut(self, full)

    monkeypatch.setattr(OwnWeights, "copy_cut", poisoned)
    monkeypatch.setattr(own_weights, "ALIGNMENT", 1)  # small shards begin anywhere


def _groups(zero):
    return [group.params for unit in zero._runtime.all_units() for group in unit.groups]


def _shares(param, tensor):
    return param.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


class Looks(nn.Module):
    """A linear layer that calls ``look(weight, bias)`` in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(WIDTH, WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.look = lambda weight, bias: None

    def forward(self, x):
        self.look(self.weight, self.bias)
        return nn.functional.linear(x, self.weight, self.bias)


def _looking(comm, look):
    """An engine whose blocks call ``look(params, weight, bias)``, with the `FlatParams` of their unit."""
    net = Net(block=Looks)
    zero = Zero(net, 3, units=net.blocks, comm=comm)
    for block, params in zip(net.blocks, _groups(zero)[1:], strict=True):
        block.look = partial(look, params)
    return net, zero


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_gives_the_bits_of_the_other_stages(world_size):
    assert_every_stage_equals_one_process(Net, world_size=world_size, zero_kwargs={"units": lambda net: net.blocks})


def test_a_parameter_that_lies_in_the_own_shard_is_a_view_of_the_master():
    """On two ranks rank 0 has the first part of the weight, rank 1 its rest and the bias."""

    def go(comm):
        seen = []

        def look(params, weight, bias):
            seen.append((_shares(weight, params.master), _shares(bias, params.master)))

        net, _ = _looking(comm, look)
        net(rows(comm.rank)).sum().backward()
        return seen

    first, second = run_threads(go, 2)
    assert first == [(False, False)] * 3
    assert second == [(False, True)] * 3


@pytest.mark.parametrize(("bias", "who"), [(True, [True, False]), (False, [True, True])])
def test_only_where_memory_is_aligned_as_in_the_gathered_buffer(bias, who, monkeypatch):
    """With a bias rank 1's shard begins 36 * 4 bytes into the buffer, which is no multiple of 64; without, 32 * 4."""
    monkeypatch.undo()

    def go(comm):
        params = Zero(nn.Linear(8, 8, bias=bias), 3, comm=comm)._runtime.root.groups[0].params
        return params._own_weights is not None

    assert run_threads(go, 2) == who


def _written(comm, write):
    """The state after all weights were doubled by ``write(param)`` in a forward, and what the forward computed."""

    def look(params, weight, bias):
        for param in (weight, bias):
            write(param)

    net, zero = _looking(comm, look)
    with torch.no_grad():
        found = net(rows(0))
    return zero.state_dict(), found


def _in_place(param):
    with torch.no_grad():
        param.mul_(2)


def _by_assignment(param):
    param.data = param.data * 2


@pytest.mark.parametrize("write", [_in_place, _by_assignment])
def test_what_a_forward_writes_is_kept_as_in_one_process(write):
    alone = Net()
    for param in alone.blocks.parameters():
        write(param)
    for state, found in run_threads(lambda comm: _written(comm, write), 2):
        for name, tensor in alone.state_dict().items():
            assert torch.equal(state[name], tensor), name
        assert write is _by_assignment or torch.equal(found, alone(rows(0)))


@pytest.mark.filterwarnings(r"ignore:full_params\(\). weights were written to in this block")
@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("after", ["a step", "a forward"])
def test_writes_inside_full_params_are_dropped_or_kept(write_back, after):
    def go(comm):
        net = Net()
        zero = Zero(net, 3, units=net.blocks, comm=comm)
        before = zero.state_dict()
        if after == "a forward":
            net(rows(comm.rank))  # the last unit's weights stay unsharded until backward
        with zero.full_params(write_back=write_back):
            whole = {name: param.detach().clone() for name, param in net.named_parameters()}
            for param in net.parameters():
                _in_place(param)
        return before, whole, zero.state_dict()

    for before, whole, found in run_threads(go, 2):
        for name, tensor in before.items():
            assert torch.equal(whole[name], tensor)
            assert torch.equal(found[name], tensor * (2 if write_back else 1))


def test_what_full_params_handed_out_keeps_its_values_until_the_weights_change():
    def go(comm):
        net = Net()
        zero = Zero(net, 3, units=net.blocks, comm=comm)
        net(rows(comm.rank)).sum().backward()
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        with zero.full_params():
            kept = [param.detach() for param in net.parameters()]
        copies = [tensor.clone() for tensor in kept]
        expected = list(zero.state_dict().values())
        optim.step()
        return kept, copies, expected

    for kept, copies, expected in run_threads(go, 2):
        torch.testing.assert_close(copies, expected, rtol=0, atol=0)
        assert all(tensor.isnan().all() for tensor in kept)


def test_an_output_that_is_a_view_of_the_master_is_a_copy():
    class Gives(Looks):
        def forward(self, x):
            return super().forward(x), self.bias

    def path(net, x):
        for block in net.blocks:
            x, bias = block(x)
            net.given.append(bias)
            x = x + bias
        return x

    def go(comm):
        net = Net(block=Gives, path=path)
        net.given = []
        zero = Zero(net, 3, units=net.blocks, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        before = zero.state_dict()
        net(rows(comm.rank)).sum().backward()
        optim.step()
        return [before[f"blocks.{i}.bias"] for i in range(3)], net.given

    for before, given in run_threads(go, 2):
        torch.testing.assert_close(given, before, rtol=0, atol=0)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"precision": MixedPrecision(param_dtype=torch.bfloat16)},
        {"precision": MixedPrecision(gather=torch.bfloat16)},
        {"secondary_shard_size": 2},
        {"stage": 2},
    ],
    ids=["compute dtype", "wire format", "second copy", "stage 2"],
)
def test_where_the_master_is_not_what_is_computed_with_nothing_is_left_out(kwargs, monkeypatch):
    monkeypatch.setattr(precision, "EXACT_NUMEL", 0)  # the wire format is for small matrices too

    def go(comm):
        zero = Zero(Net(), **({"stage": 3} | kwargs), comm=comm)
        return {params._own_weights for params in _groups(zero) if params.layout.slots[0].shape == (WIDTH, WIDTH)}

    assert run_threads(go, 4) == [{None}] * 4


def test_only_communicators_that_can_leave_a_slice_out_do():
    def go(comm):
        return leaves_own_slice(comm), leaves_own_slice(BlockingCommunicator(comm))

    assert run_threads(go, 2) == [(True, True)] * 2
    assert not leaves_own_slice(NullCommunicator(2))
    assert not leaves_own_slice(BlockingCommunicator(NullCommunicator(2)))
