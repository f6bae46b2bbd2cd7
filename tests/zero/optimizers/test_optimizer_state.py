"""The whole state of an optimizer is what the unsharded one's would be; one rank's part is not to be had by mistake."""

import copy
import warnings

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import zeroshard
from nets import Net, rows
from zeroshard.checkpoint import api
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

CLASSES = {
    "AdamW": (torch.optim.AdamW, {}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


def groups_of(net):
    members = [param for name, param in net.named_parameters() if "blocks.1" not in name]
    return [{"params": members[::2], "lr": 0.03}, {"params": members[1::2], "weight_decay": 0.0}]


def steps(net, optim, ranks, which):
    for step in which:
        for rank in ranks:
            (net(rows(rank, step)).square().mean() / len(ranks)).backward()
        optim.step()
        optim.zero_grad()


def assert_same(found, expected):
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        assert found["state"][number].keys() == state.keys()
        for kind, value in state.items():
            torch.testing.assert_close(found["state"][number][kind], value, rtol=1e-4, atol=1e-6)


@pytest.mark.redundant
@pytest.mark.pairwise("stage")
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stage", STAGES)
def test_the_full_state_is_the_unsharded_optimizers_and_goes_back_and_forth(stage, name):
    cls, kwargs = CLASSES[name]
    plain = Net()
    unsharded = cls(groups_of(plain), lr=0.01, **kwargs)
    steps(plain, unsharded, range(3), range(2))

    def train(comm, start=None, which=range(2)):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(cls, groups_of(net), lr=0.5, **kwargs)
        if start is None:
            for group, lr in zip(optim.param_groups, (0.03, 0.01), strict=True):
                group["lr"] = lr
        else:
            zero.load_state_dict(start[0])
            optim.load_state_dict(start[1])  # with its settings
        steps(net, optim, [comm.rank], which)
        return zero.state_dict(), zero.optim_state_dict()

    weights, state = run_threads(train, 3)[1]
    assert_same(state, unsharded.state_dict())
    other = Net()
    other.load_state_dict(weights)
    fresh = cls(groups_of(other), lr=0.5, **kwargs)
    fresh.load_state_dict(copy.deepcopy(state))
    steps(other, fresh, range(3), range(2, 4))
    # from rank 0's file into another world, and from one process into it
    for source in ((weights, state), (dict(plain.state_dict()), unsharded.state_dict())):
        again, _ = run_threads(lambda comm, source=source: train(comm, source, range(2, 4)), 3)[2]
        torch.testing.assert_close(dict(again), dict(other.state_dict()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:model.parameters")  # which are members here, whatever their values
def test_one_ranks_part_is_refused_by_name(stage):
    net = Net()
    zero = Zero(net, stage=stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.AdamW)
    steps(net, optim, [0], range(1))
    if stage == 0:
        assert optim.state_dict()["state"][0]["exp_avg"].shape == net.first.weight.shape
        assert_same(optim.state_dict(), zero.optim_state_dict())
        return
    message = r"^optimizer.state_dict\(\): each rank holds a part .* zero.optim_state_dict\(optimizer\) on every rank"
    for ask in (optim.state_dict, lambda: get_optimizer_state_dict(net, optim)):
        with pytest.raises(RuntimeError, match=message):
            ask()


def test_the_state_of_one_process_is_whole():
    net, plain = Net(), Net()
    optim = Zero(net, comm=LocalCommunicator()).optimizer(torch.optim.AdamW, lr=0.1)
    unsharded = torch.optim.AdamW(plain.parameters(), lr=0.1)
    steps(net, optim, [0], range(2))
    steps(plain, unsharded, [0], range(2))
    assert_same(optim.state_dict(), unsharded.state_dict())
    found = get_optimizer_state_dict(net, optim)
    assert found["state"]["first.weight"]["exp_avg"].shape == (6, 6)


def test_hooks_on_the_state_see_the_whole_of_it():
    net = Net()
    optim = Zero(net, comm=LocalCommunicator()).optimizer(torch.optim.AdamW, lr=0.1)
    steps(net, optim, [0], range(1))
    seen = []
    optim.register_state_dict_pre_hook(lambda optim: seen.append("saving"))
    optim.register_state_dict_post_hook(lambda optim, state: {**state, "more": 1})
    optim.register_load_state_dict_pre_hook(
        lambda optim, state: seen.append(tuple(state["state"][0]["exp_avg"].shape)) or state
    )
    state = optim.state_dict()
    assert state["more"] == 1
    optim.load_state_dict(state)
    assert seen == ["saving", (6, 6)]


def test_what_is_no_full_state_is_refused():
    net = Net()
    zero = Zero(net, stage=1, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.AdamW)
    steps(net, optim, [0], range(1))
    whole = torch.optim.AdamW(Net().parameters()).state_dict()
    whole["state"][0] = {"step": torch.tensor(1.0), "exp_avg_sq": torch.zeros(6, 6)}
    part = {**whole, "state": {0: {**whole["state"][0], "exp_avg": torch.zeros(31)}}}
    with pytest.raises(ValueError, match=r"exp_avg of first.weight has the shape \(31,\).*zero.optim_state_dict\(\)"):
        optim.load_state_dict(part)
    with pytest.raises(ValueError, match=r"state_dict: its groups are of \[1\] parameters, this optimizer's of \[10\]"):
        optim.load_state_dict(torch.optim.AdamW([net.first.weight]).state_dict())
    with pytest.raises(ValueError, match=r"optim_state_dict: a SGD that is not this engine's"):
        zero.optim_state_dict(torch.optim.SGD([torch.ones(1, requires_grad=True)]))
    with pytest.raises(ValueError, match=r"optim_state_dict: this engine has 0 optimizers; name the one that is meant"):
        Zero(Net(), comm=NullCommunicator(2)).optim_state_dict()


# -- checkpoints ----------------------------------------------------------------------------------------------------


def saved(path, **kwargs):
    net = Net()
    zero = Zero(net, comm=LocalCommunicator())
    optim = zero.optimizer(torch.optim.AdamW, groups_of(net), lr=2e-3, betas=(0.5, 0.75), **kwargs)
    steps(net, optim, [0], range(2))
    api.save(path, zero, step=2)
    return zero, optim


def test_a_checkpoint_restores_the_settings_of_param_groups(tmp_path):
    _, first = saved(tmp_path / "a", foreach=True)

    def load(**kwargs):
        net = Net()
        zero = Zero(net, stage=1, comm=LocalCommunicator())
        optim = zero.optimizer(torch.optim.AdamW, groups_of(net)[::-1], lr=torch.tensor(1e-2), foreach=False)
        zeroshard.load(tmp_path / "a", zero, **kwargs)
        return optim

    restored = load()
    assert [float(group["lr"]) for group in restored.param_groups] == pytest.approx([2e-3, 0.03])
    assert isinstance(restored.param_groups[0]["lr"], torch.Tensor)
    assert [group["betas"] for group in restored.param_groups] == [(0.5, 0.75)] * 2
    assert [group["weight_decay"] for group in restored.param_groups] == [0.0, 0.01]
    assert [group["foreach"] for group in restored.param_groups] == [False] * 2
    kept = load(settings=False)
    assert [float(group["lr"]) for group in kept.param_groups] == pytest.approx([1e-2, 0.03])
    by_names = zeroshard.consolidate(tmp_path / "a")["optimizer"]
    kept.load_state_dict({**by_names, "param_groups": by_names["param_groups"][::-1]})
    assert torch.equal(kept.state_dict()["state"][4]["exp_avg"], first.state_dict()["state"][0]["exp_avg"])


def test_groups_of_other_parameters_keep_their_settings_and_say_so(tmp_path):
    saved(tmp_path / "a")
    net = Net()
    zero = Zero(net, comm=LocalCommunicator())
    optim = zero.optimizer(torch.optim.AdamW, [p for group in groups_of(net) for p in group["params"]], lr=1e-2)
    with pytest.warns(
        UserWarning, match=r"^load: no saved param group has the parameters of the one with first.weight"
    ):
        zeroshard.load(tmp_path / "a", zero)
    assert optim.param_groups[0]["lr"] == 1e-2
    assert optim.state_dict()["state"][0]["step"] == 2


def test_states_that_nobody_took_are_told_when_their_optimizer_comes(tmp_path):
    saved(tmp_path / "a")
    net = Net()
    zero = Zero(net, comm=LocalCommunicator())
    zeroshard.load(tmp_path / "a", zero)
    with pytest.warns(
        UserWarning, match=r"^optimizer: the checkpoint that was loaded has states for AdamW, which begins"
    ):
        zero.optimizer(torch.optim.AdamW, groups_of(net))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zero.optimizer(torch.optim.AdamW, net.blocks[1].parameters())  # of which none were saved


@pytest.mark.redundant(but=["0"])
@pytest.mark.parametrize("stage", STAGES)
def test_masters_dtype_is_the_states(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm, precision=MixedPrecision(param_dtype=torch.bfloat16))
        optim = zero.optimizer(torch.optim.AdamW)
        steps(net, optim, [comm.rank], range(1))
        state = zero.optim_state_dict(optim)
        optim.load_state_dict(state)
        assert_same(zero.optim_state_dict(optim), state)
        return {value.dtype for kinds in state["state"].values() for value in kinds.values()}

    assert run_threads(go, 2) == [{torch.float32}] * 2
