"""States that are kept in bfloat16: the same bits on any ranks, right on average, half the bytes, or refused."""

import copy
from itertools import pairwise

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import Offload, Zero
from zeroshard.zero.optimizers.state_formats import CHUNK_NUMEL, NarrowStates, rounded

NUM_MICRO = 4
NET = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 5), nn.Linear(5, 4))
SETTINGS = {torch.optim.AdamW: {"lr": 0.01}, torch.optim.SGD: {"lr": 0.01, "momentum": 0.9}}


def engine(comm, stage, cls=torch.optim.AdamW, state_format="bf16", **kwargs):
    net = copy.deepcopy(NET)
    zero = Zero(net, stage, [net[0], net[2]], comm, reproducible=NUM_MICRO, **kwargs)
    return zero, zero.optimizer(cls, state_format=state_format, **SETTINGS[cls])


def train(zero, optimizer, steps):
    num_own = NUM_MICRO // zero.comm.world_size
    for step in steps:
        for number in range(num_own):
            x = torch.full((2, 7), 0.1) * (step + 1) + 0.1 * (zero.comm.rank * num_own + number)
            with zero.micro_batch(last=number == num_own - 1):
                ((zero.model(x) - 1).square().mean() / num_own).backward()
        optimizer.step()
        optimizer.zero_grad()


def states(zero):
    found = {
        (number, kind): torch.as_tensor(value)
        for number, state in zero.optim_state_dict()["state"].items()
        for kind, value in state.items()
    }
    return {**zero.state_dict(), **found}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) and found[key].dtype == value.dtype for key, value in expected.items())


def trained(comm, stage, **kwargs):
    zero, optimizer = engine(comm, stage, **kwargs)
    train(zero, optimizer, range(4))
    return states(zero), zero.memory_bytes()


@pytest.mark.parametrize("cls", SETTINGS)
def test_bits_are_the_same_at_each_stage_and_number_of_ranks_and_with_offload(cls):
    expected, held = trained(LocalCommunicator(), 0, cls=cls)
    wide = trained(LocalCommunicator(), 0, cls=cls, state_format="fp32")[1]
    numel, num_moments = sum(p.numel() for p in NET.parameters()), 2 if cls is torch.optim.AdamW else 1
    assert wide["optimizer"] - held["optimizer"] == 2 * num_moments * numel
    for world_size, stage in ((1, 3), (2, 0), (2, 1), (2, 3), (4, 2), (4, 3)):
        for found, _ in run_threads(lambda comm, stage=stage: trained(comm, stage, cls=cls), world_size):
            assert_equal(found, expected)
    offload = Offload(grads="device")
    for found, held in run_threads(lambda comm: trained(comm, 2, cls=cls, offload=offload), 2):
        assert_equal(found, expected)
        assert held["host_optimizer"] < 2 * num_moments * numel  # a half of them in bf16, and counts of steps


def test_a_checkpoint_continues_with_the_same_bits_elsewhere_and_loads_into_fp32_and_back(tmp_path):
    def saved(comm):
        zero, optimizer = engine(comm, 3)
        train(zero, optimizer, range(2))
        zeroshard.save(tmp_path / "narrow", zero, step=2)

    def resumed(comm, state_format="bf16", folder="narrow"):
        zero, optimizer = engine(comm, 1, state_format=state_format)
        zeroshard.load(tmp_path / folder, zero)
        return zero, optimizer

    run_threads(saved, 2)
    zero, optimizer = resumed(LocalCommunicator())
    train(zero, optimizer, range(2, 4))
    assert_equal(states(zero), trained(LocalCommunicator(), 0)[0])

    narrow, _ = resumed(LocalCommunicator())
    wide, _ = resumed(LocalCommunicator(), "fp32")
    for key, value in states(narrow).items():
        assert torch.equal(states(wide)[key], value.to(states(wide)[key].dtype))
    zeroshard.save(tmp_path / "wide", wide, step=2)
    assert_equal(states(resumed(LocalCommunicator(), folder="wide")[0]), states(narrow))
    again, optimizer = engine(LocalCommunicator(), 2)
    optimizer.load_state_dict(wide.optim_state_dict())
    assert_equal({**states(again), **narrow.state_dict()}, states(narrow))


def test_states_that_a_load_rounds_are_told_of_in_a_line():
    wide, optimizer = engine(LocalCommunicator(), 0, state_format="fp32")
    train(wide, optimizer, range(1))
    _, loading = engine(LocalCommunicator(), 2)
    with pytest.warns(UserWarning, match="^optimizer: the loaded states are rounded to bf16, .*$"):
        loading.load_state_dict(wide.optim_state_dict())
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in loading.state.values())


def test_a_state_that_changes_slowly_is_right_on_average_and_not_finite_numbers_stay():
    values = torch.full((200_000,), 1.0 + 2**-10)  # an eighth of the way to the next number, 1 + 2^-7
    means = [rounded(values, 5, torch.tensor(float(step)), 3).float().mean() for step in range(4)]
    assert all(abs(mean - values[0]) < 2e-5 for mean in means)
    assert len(set(map(float, means))) == 4
    assert values.bfloat16().float().mean() == 1.0  # to the nearest, it would never change
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0, 1e-45])
    found = rounded(odd, 1, 1, 0)
    assert torch.equal(found[[0, 1, 3, 4]].float(), odd[[0, 1, 3, 4]])
    assert found[2].isnan()
    assert 0 <= found[5] < 1e-38


def test_noise_is_of_the_place_in_the_parameter_and_not_of_the_piece():
    values = torch.randn(2 * CHUNK_NUMEL + 9, generator=torch.Generator().manual_seed(0))
    cuts = (0, 5, CHUNK_NUMEL + 7, values.numel())
    pieces = [rounded(values[a:b], 7, 2.0, a) for a, b in pairwise(cuts)]
    assert torch.equal(torch.cat(pieces), rounded(values, 7, 2.0, 0))
    assert not torch.equal(rounded(values, 8, 2.0, 0), rounded(values, 7, 2.0, 0))


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("cls", "state_format", "line"),
    [
        (torch.optim.Muon, "bf16", "Muon cannot keep its states in bf16: it orthogonalises the updates of matrices"),
        (torch.optim.LBFGS, "bf16", "LBFGS cannot keep .* it calls the closure again"),
        (torch.optim.ASGD, "bf16", "ASGD cannot keep .* no moments of gradients; use 'fp32'"),
        (Mine, "bf16", "Mine cannot keep .* it is no class of torch.optim"),
        (torch.optim.AdamW, "int9", "state_format: 'int9' is no format; use 'fp32' or 'bf16'"),
    ],
)
def test_what_cannot_is_refused_in_a_line_and_takes_no_parameters(cls, state_format, line):
    zero = Zero(copy.deepcopy(NET), 2, comm=LocalCommunicator())
    with pytest.raises(ValueError, match=line) as error:
        zero.optimizer(cls, state_format=state_format)
    assert "\n" not in str(error.value)
    zero.optimizer(torch.optim.AdamW)


def test_one_units_states_are_wide_at_a_time(monkeypatch):
    zero, optimizer = engine(LocalCommunicator(), 0)
    train(zero, optimizer, range(1))
    seen, own = [], NarrowStates.take_back

    def looking(member):
        moments = [state["exp_avg"] for state in optimizer.state.values()]
        seen.append(sum(moment.numel() for moment in moments if moment.dtype == torch.float32))
        own(member)

    monkeypatch.setattr(NarrowStates, "take_back", looking)
    train(zero, optimizer, range(1, 2))
    assert sorted(filter(None, seen)) == [5 * 4 + 4, 30 * 5 + 5, 7 * 30 + 30]  # the root's layer, and each unit's
