"""`ShardedOptimizer(state_format=)`: the same bits on any ranks and in any place, in fewer bytes, or refused."""

import copy

import pytest
import torch
from torch import nn

from zeroshard import ShardedOptimizer
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.state_formats.formats import FORMATS
from zeroshard.zero import Offload

NET = nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 5), nn.Linear(5, 4))
NARROW = ("bf16", "int8")


def made(comm, state_format, **kwargs):
    net = copy.deepcopy(NET)
    how = {"comm": comm, "state_format": state_format, "bucket_bytes": 1024, "lr": 0.01, **kwargs}
    return net, ShardedOptimizer(net.parameters(), torch.optim.AdamW, **how)


def train(net, optimizer, steps, *, closure=False):
    for step in steps:

        def computed(step=step):
            optimizer.zero_grad()
            loss = (net(torch.full((2, 7), 0.1) * (step + 1)) - 1).square().mean()
            loss.backward()
            return loss

        if closure:
            optimizer.step(computed)
        else:
            computed()
            optimizer.step()


def found(net, optimizer):
    optimizer.consolidate_state_dict()
    state = optimizer.state_dict() if optimizer.comm.rank == 0 else None
    weights = torch.cat([param.detach().flatten() for param in net.parameters()])
    kept = sum(v.nbytes for s in optimizer.optim.state.values() for v in s.values() if torch.is_tensor(v) and v.dim())
    return weights, state, kept


def trained(comm, state_format, *, closure=False, **kwargs):
    net, optimizer = made(comm, state_format, **kwargs)
    train(net, optimizer, range(4), closure=closure)
    return found(net, optimizer)


@pytest.mark.parametrize("narrow", NARROW)
def test_bits_are_those_of_one_process_whatever_ranks_closures_and_places_of_states(narrow, tmp_path):
    expected, state, kept = trained(LocalCommunicator(), narrow)
    assert kept == 2 * sum(FORMATS[narrow].num_bytes(param.numel()) for param in NET.parameters())
    assert not torch.equal(expected, trained(LocalCommunicator(), "fp32")[0])
    host, disk = Offload(grads="device"), Offload("disk", grads="device", path=tmp_path)
    for num_ranks, how in ((2, {}), (3, {}), (1, {"closure": True}), (1, {"offload": host}), (1, {"offload": disk})):
        for weights, theirs, bytes_here in run_threads(lambda comm, how=how: trained(comm, narrow, **how), num_ranks):
            assert torch.equal(weights, expected)
            assert bytes_here < kept or num_ranks == 1
            if theirs is not None:
                for number, kinds in state["state"].items():
                    assert all(torch.equal(theirs["state"][number][kind], value) for kind, value in kinds.items())


@pytest.mark.parametrize("narrow", NARROW)
def test_a_state_dict_continues_on_other_ranks_and_fp32_states_load_too(narrow):
    expected, _, _ = trained(LocalCommunicator(), narrow)

    def continued(comm, state, weights, state_format=narrow):
        net, optimizer = made(comm, state_format)
        net.load_state_dict(weights)
        optimizer.load_state_dict(state)
        train(net, optimizer, range(2, 4))
        return torch.cat([param.detach().flatten() for param in net.parameters()])

    net, optimizer = made(LocalCommunicator(), narrow)
    train(net, optimizer, range(2))
    state = found(net, optimizer)[1]
    for weights in run_threads(lambda comm: continued(comm, state, net.state_dict()), 2):
        assert torch.equal(weights, expected)
    wide = continued(LocalCommunicator(), state, net.state_dict(), "fp32")
    assert (wide - expected).norm() < 0.02 * expected.norm()

    net, optimizer = made(LocalCommunicator(), "fp32")
    train(net, optimizer, range(2))
    state = found(net, optimizer)[1]
    with pytest.warns(UserWarning, match=f"^optimizer: the loaded states are rounded to {narrow}"):
        continued(LocalCommunicator(), state, net.state_dict())


def test_what_cannot_is_refused_in_a_line_and_ranks_must_agree():
    with pytest.raises(ValueError, match=r"^state_format: Adafactor cannot keep its states in int8: .*; use 'fp32'$"):
        ShardedOptimizer(NET.parameters(), torch.optim.Adafactor, state_format="int8")
    with pytest.raises(ValueError, match=r"^state_format: SGD cannot .* momentum=0\.99 "):
        ShardedOptimizer(NET.parameters(), torch.optim.SGD, state_format="int8", momentum=0.99, lr=0.1)

    def mixed(comm):
        made(comm, NARROW[comm.rank])

    with pytest.raises(Exception, match="states in"):
        run_threads(mixed, 2)
