"""States that are kept in bfloat16 or in 8-bit blocks: the same bits on any ranks, fewer bytes, or refused."""

import copy

import pytest
import torch
from torch import nn

import zeroshard
from soak import soaking
from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero import Offload, Zero
from zeroshard.zero.state_formats.formats import FORMATS, STATES
from zeroshard.zero.state_formats.operands import FormattedStates

NUM_MICRO = 4
with torch.random.fork_rng([]):
    torch.manual_seed(0)  # else what was imported before decides how far int8 drifts
    NET = nn.Sequential(nn.Linear(7, 90), nn.Tanh(), nn.Linear(90, 5), nn.Linear(5, 4))
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
    steps = sum(torch.as_tensor(state["step"]).nbytes for state in optimizer.state.values() if "step" in state)
    return states(zero), {**zero.memory_bytes(), "steps": steps}


HOW = {torch.optim.SGD: {"momentum": 0.9}, torch.optim.RMSprop: {"momentum": 0.5}}
NARROW = ("bf16", "int8")


def kept_bytes(form, numels):
    return sum(FORMATS[form].num_bytes(numel) for numel in numels)


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("cls", SETTINGS)
def test_bits_are_the_same_at_each_stage_and_number_of_ranks_and_with_offload(cls, narrow):
    expected, held = trained(LocalCommunicator(), 0, cls=cls, state_format=narrow)
    numels, num_moments = [p.numel() for p in NET.parameters()], 2 if cls is torch.optim.AdamW else 1
    kept = num_moments * kept_bytes(narrow, numels)
    assert held["optimizer"] == kept + held["steps"]
    others = ((1, 3), (2, 0), (2, 3), (4, 3)) if soaking() else ((2, 0), (2, 3))
    for world_size, stage in ((2, 1), (4, 2), *others):
        run = lambda comm, stage=stage: trained(comm, stage, cls=cls, state_format=narrow)  # noqa: E731
        for found, _ in run_threads(run, world_size):
            assert_equal(found, expected)
    offload = Offload(grads="device")
    for found, held in run_threads(lambda comm: trained(comm, 2, cls=cls, state_format=narrow, offload=offload), 2):
        assert_equal(found, expected)
        assert held["host_optimizer"] - held["steps"] < kept  # a part of them


@pytest.mark.parametrize("narrow", NARROW)
def test_where_shards_end_does_not_matter_to_rounding(narrow):
    """Without exact sums shards end elsewhere in each world; sums of equal gradients are exact."""

    def one_step(comm, stage):
        net = copy.deepcopy(NET)
        zero = Zero(net, stage, [net[0], net[2]], comm)
        optimizer = zero.optimizer(torch.optim.AdamW, state_format=narrow)
        net(torch.full((2, 7), 0.1)).square().mean().backward()
        optimizer.step()
        return zero.optim_state_dict()["state"]

    expected = one_step(LocalCommunicator(), 0)
    for world_size, stage in ((2, 3), (4, 1)):
        found = run_threads(lambda comm, stage=stage: one_step(comm, stage), world_size)[0]
        assert all(torch.equal(found[n][kind], value) for n in expected for kind, value in expected[n].items())


@pytest.mark.parametrize("narrow", NARROW)
def test_a_checkpoint_continues_with_the_same_bits_elsewhere_and_fp32_loads_into_it(tmp_path, narrow):
    def saved(comm):
        zero, optimizer = engine(comm, 3, state_format=narrow)
        train(zero, optimizer, range(2))
        zeroshard.save(tmp_path / "narrow", zero, step=2)
        return zero.optim_state_dict()

    def resumed(comm, state_format=narrow, folder="narrow"):
        zero, optimizer = engine(comm, 1, state_format=state_format)
        zeroshard.load(tmp_path / folder, zero)
        return zero, optimizer

    unsharded, _ = run_threads(saved, 2)
    expected = trained(LocalCommunicator(), 0, state_format=narrow)[0]
    zero, optimizer = resumed(LocalCommunicator())
    train(zero, optimizer, range(2, 4))
    assert_equal(states(zero), expected)
    zero, optimizer = resumed(LocalCommunicator())
    optimizer.load_state_dict(unsharded)
    zero.restage(2)
    train(zero, optimizer, range(2, 4))
    assert_equal(states(zero), expected)


@pytest.mark.parametrize("cls", STATES)
def test_int8_states_load_into_an_optimizer_in_fp32_and_its_states_into_one_in_int8(cls, tmp_path):
    def made(state_format):
        zero = Zero(copy.deepcopy(NET), 2, comm=LocalCommunicator())
        optimizer = zero.optimizer(cls, state_format=state_format, lr=0.01, **HOW.get(cls, {}))
        return zero, optimizer

    first, stepped = made("int8")
    first.model(torch.ones(2, 7)).square().mean().backward()
    stepped.step()
    zeroshard.save(tmp_path / "int8", first, step=1)
    wide, _ = made("fp32")
    zeroshard.load(tmp_path / "int8", wide)
    zeroshard.save(tmp_path / "fp32", wide, step=1)
    again, _ = made("int8")
    with pytest.warns(UserWarning, match="^optimizer: the loaded states are rounded to int8"):
        zeroshard.load(tmp_path / "fp32", again)
    mine, theirs = states(first), states(again)
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():  # codes of codes: of one in a thousand another number is nearest
        assert (value.float() - theirs[key].float()).abs().max() <= (1 if value.dtype == torch.int8 else 1e-5)


@pytest.mark.parametrize("narrow", NARROW)
def test_states_that_a_load_rounds_are_told_of_in_a_line(narrow):
    wide, optimizer = engine(LocalCommunicator(), 0, state_format="fp32")
    train(wide, optimizer, range(1))
    zero, loading = engine(LocalCommunicator(), 2, state_format=narrow)
    with pytest.warns(UserWarning, match=f"^optimizer: the loaded states are rounded to {narrow}, .*$"):
        loading.load_state_dict(wide.optim_state_dict())
    assert zero.memory_bytes()["optimizer"] < wide.memory_bytes()["optimizer"]
    train(zero, loading, range(1, 2))


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("cls", STATES)
def test_every_class_of_the_table_trains_as_in_fp32_but_for_rounding(cls, narrow):
    amsgrad = {"amsgrad": True} if "max_exp_avg_sq" in STATES[cls] and cls is torch.optim.AdamW else {}

    def weights(state_format):
        torch.manual_seed(0)
        net = copy.deepcopy(NET)
        zero = Zero(net, 2, comm=LocalCommunicator())
        optimizer = zero.optimizer(cls, state_format=state_format, lr=1e-2, **HOW.get(cls, {}), **amsgrad)
        for step in range(8):
            (net(torch.full((2, 7), 0.1) * (step + 1)) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        kinds = {kind for state in optimizer.state.values() for kind in state}
        return torch.cat([value.flatten() for value in zero.state_dict().values()]), kinds

    expected, own = weights("fp32")
    found, kept = weights(narrow)
    start = torch.cat([param.detach().flatten() for param in NET.parameters()])
    assert (found - expected).norm() < 0.1 * (expected - start).norm()
    suffixes = FORMATS[narrow].kept
    moments = set(STATES[cls]) & own
    assert moments
    assert kept == own - moments | {kind + suffix for kind in moments for suffix in suffixes}
    assert own - moments <= {"step", "mu_product"}


class Mine(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("cls", "state_format", "settings", "line"),
    [
        (torch.optim.Muon, "bf16", {}, "Muon cannot keep its states in bf16: it orthogonalises the updates of matric"),
        (torch.optim.LBFGS, "int8", {}, "LBFGS cannot keep .* it calls the closure again"),
        (torch.optim.ASGD, "bf16", {}, "ASGD cannot keep .* no moments of gradients; use 'fp32'"),
        (Mine, "int8", {}, "Mine cannot keep .* it is no class of torch.optim"),
        (torch.optim.AdamW, "int9", {}, "state_format: 'int9' is no format; use 'fp32', 'bf16' or 'int8'"),
        (torch.optim.RMSprop, "bf16", {"centered": True}, "RMSprop cannot .* may be negative; use 'fp32'"),
        (torch.optim.SGD, "int8", {"momentum": 0.99}, "SGD cannot .* momentum=0.99 decays .*; use 'fp32'"),
    ],
)
def test_what_cannot_is_refused_in_a_line_and_takes_no_parameters(cls, state_format, settings, line):
    zero = Zero(copy.deepcopy(NET), 2, comm=LocalCommunicator())
    with pytest.raises(ValueError, match=line) as error:
        zero.optimizer(cls, state_format=state_format, **settings)
    assert "\n" not in str(error.value)
    zero.optimizer(torch.optim.AdamW)


def test_a_parameter_that_is_no_fp32_number_is_refused_also_in_a_later_group():
    zero = Zero(copy.deepcopy(NET).double(), 2, comm=LocalCommunicator())
    with pytest.raises(ValueError, match=r"a parameter is torch\.float64, and it is for states of torch\.float32"):
        zero.optimizer(torch.optim.AdamW, state_format="int8")
    zero = Zero(copy.deepcopy(NET), 2, comm=LocalCommunicator())
    optimizer = zero.optimizer(torch.optim.SGD, zero.model[0].parameters(), state_format="int8", lr=0.1)
    with pytest.raises(ValueError, match=r"momentum=0\.95"):
        optimizer.add_param_group({"params": list(zero.model[2].parameters()), "momentum": 0.95})
    optimizer.add_param_group({"params": list(zero.model[2].parameters()), "momentum": 0.9})
    zero.model(torch.ones(2, 7)).sum().backward()
    optimizer.step()
    assert any("momentum_buffer_codes" in state for state in optimizer.state.values())


@pytest.mark.parametrize("narrow", NARROW)
def test_one_units_states_are_wide_at_a_time(monkeypatch, narrow):
    zero, optimizer = engine(LocalCommunicator(), 0, state_format=narrow)
    train(zero, optimizer, range(1))
    seen, own = [], FormattedStates.take_back

    def looking(member):
        moments = [state["exp_avg"] for state in optimizer.state.values() if "exp_avg" in state]
        seen.append(sum(moment.numel() for moment in moments if moment.dtype == torch.float32))
        own(member)

    monkeypatch.setattr(FormattedStates, "take_back", looking)
    train(zero, optimizer, range(1, 2))
    assert sorted(filter(None, seen)) == [5 * 4 + 4, 90 * 5 + 5, 7 * 90 + 90]  # the root's layer, and each unit's


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("cls", STATES)
def test_a_step_by_parts_has_the_bits_of_one_on_whole_pieces_and_few_states_are_wide(monkeypatch, cls, narrow):
    def stepped(most, offload=None):
        monkeypatch.setattr("zeroshard.zero.state_formats.operands.most_at_once", lambda _: most)
        net, seen = copy.deepcopy(NET), [0]
        zero = Zero(net, 2, [net[0], net[2]], LocalCommunicator(), offload=offload)
        optimizer = zero.optimizer(cls, state_format=narrow, lr=1e-2, **HOW.get(cls, {}))
        own = FormattedStates.take_back

        def looking(member):
            brought = [dict.get(optimizer.state, piece, {}) for piece, _ in member._brought]
            moments = [state[kind] for state in brought for kind in STATES[cls] if kind in state]
            seen.append(sum(moment.numel() for moment in moments if moment.dtype == torch.float32))
            own(member)

        monkeypatch.setattr(FormattedStates, "take_back", looking)
        for step in range(3):
            net(torch.full((2, 7), 0.1) * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        monkeypatch.undo()
        return states(zero), max(seen), {kind: list(state) for kind, state in zero.optim_state_dict()["state"].items()}

    expected, wide, kinds = stepped(1 << 18)
    assert wide >= 7 * 90 + 90
    for offload in (None, Offload()):
        found, wide, own_kinds = stepped(256, offload)
        assert_equal(found, expected)
        assert own_kinds == kinds
        assert 0 < wide <= 256 * len(STATES[cls])
