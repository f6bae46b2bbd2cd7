"""``torch.optim.AdamW(model.parameters())`` beside `Zero` trains as in one process, or is refused by name."""

import pytest
import torch
from torch import nn

from nets import Net, rows
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.optim import MuonAdamW
from zeroshard.zero import STAGES, MixedPrecision, ShardedOptimizer, Zero

CLASSES = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW fused": (torch.optim.AdamW, {"fused": True}),
    "SGD": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "Adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
}


def train(net, optim, ranks, num_steps=4):
    scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.9)
    for step in range(num_steps):
        optim.zero_grad(set_to_none=step % 2 == 0)
        for rank in ranks:
            (net(rows(rank, step)).square().mean() / len(ranks)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optim.step()
        scheduler.step()
        if step == 1:
            optim.param_groups[0]["lr"] *= 2


def groups_of(net):
    return [
        {"params": [param for param in net.parameters() if param.dim() == 2], "lr": 0.02},
        {"params": [param for param in net.parameters() if param.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("made", ["before", "after"])
@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("stage", STAGES)
def test_an_optimizer_over_the_models_parameters_trains(stage, name, made):
    cls, kwargs = CLASSES[name]

    def go(comm):
        net = Net()
        optim = cls(groups_of(net), lr=0.05, **kwargs) if made == "before" else None
        zero = Zero(net, stage=stage, comm=comm)
        optim = optim or cls(groups_of(net), lr=0.05, **kwargs)
        train(net, optim, [comm.rank])
        saved = zero.optim_state_dict()
        assert [len(group["params"]) for group in saved["param_groups"]] == [5, 5]
        return dict(zero.state_dict()), zero.memory_bytes()["optimizer"]

    plain = Net()
    train(plain, cls(groups_of(plain), lr=0.05, **kwargs), range(2))
    for found, _ in run_threads(go, 2):
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-5)


@pytest.mark.redundant(but=["3"])
@pytest.mark.parametrize("stage", STAGES)
def test_state_that_it_has_already_is_kept(stage):
    """A script that loads its optimizer before the first step."""
    plain = Net()
    first = torch.optim.AdamW(plain.parameters(), lr=0.05)
    train(plain, first, range(2), 2)
    saved, weights = first.state_dict(), dict(plain.state_dict())

    def go(comm):
        net = Net()
        net.load_state_dict(weights)
        zero = Zero(net, stage=stage, comm=comm)
        optim = torch.optim.AdamW(net.parameters(), lr=0.05)
        optim.load_state_dict(saved)
        train(net, optim, [comm.rank], 2)
        return dict(zero.state_dict())

    by_rank = run_threads(go, 2)
    train(plain, first, range(2), 2)
    for found in by_rank:
        torch.testing.assert_close(found, dict(plain.state_dict()), rtol=0, atol=1e-5)


def test_steps_of_other_models_are_left_alone():
    net, other = Net(), Net()
    Zero(net, comm=NullCommunicator(2))
    optim = torch.optim.SGD(other.parameters(), lr=0.1)
    other(rows(0)).sum().backward()
    optim.step()
    assert "step" not in vars(optim)


def engine(stage=2, **kwargs):
    net = Net()
    return net, Zero(net, stage=stage, comm=NullCommunicator(2), **kwargs)


REFUSED = {
    "other parameters beside": (
        lambda net: torch.optim.SGD([*net.parameters(), nn.Parameter(torch.ones(2))], lr=0.1),
        r"^step: SGD holds parameters of an engine's model beside others; give each an optimizer of its own",
    ),
    "two engines": (
        lambda net: torch.optim.SGD([*net.parameters(), *KEPT[0].parameters()], lr=0.1),
        r"^step: SGD holds parameters of an engine's model beside others",
    ),
    "no layout": (lambda net: torch.optim.LBFGS(net.parameters()), r"LBFGS cannot be sharded"),
    "whole tensors": (
        lambda net: torch.optim.Muon([p for p in net.parameters() if p.dim() == 2]),
        r"^step: Muon needs tensors that are whole on one rank; make it by zero.optimizer\(Muon, ...\)",
    ),
    "two rules": (
        lambda net: MuonAdamW([{"params": [p for p in net.parameters() if p.dim() == 2], "matrices": True}]),
        r"MuonAdamW.*zero.optimizer",
    ),
    "how it is built is unknown": (lambda net: Needy(net.parameters(), 3), r"make it by zero.optimizer\(Needy, ...\)"),
}
KEPT = [Net()]
KEPT.append(Zero(KEPT[0], comm=NullCommunicator(2)))


class Needy(torch.optim.SGD):
    def __init__(self, params, needed):
        super().__init__(params, lr=0.1 * needed)


@pytest.mark.redundant(
    but=["other parameters beside", "two engines", "no layout", "whole tensors", "how it is built is unknown"]
)
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_taken_over_is_refused_by_name_and_takes_nothing(name):
    make, message = REFUSED[name]
    net, zero = engine()
    optim = make(net)
    net(rows(0)).sum().backward()
    with pytest.raises((ValueError, RuntimeError), match=message):
        optim.step(lambda: 0.0)
    zero.optimizer(torch.optim.SGD, lr=0.1).step()


def test_parameters_that_another_optimizer_has_are_refused():
    net, zero = engine()
    zero.optimizer(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="is in two groups"):
        torch.optim.AdamW(net.parameters()).step()


def test_parameters_that_were_on_the_meta_device_are_refused():
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(6, 6))
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    Zero(net, comm=NullCommunicator(2), init=lambda name, tensor: tensor.fill_(0.5))
    with pytest.raises(ValueError, match=r"^step: SGD holds parameters on the meta device"):
        optim.step()
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_narrow_states_are_refused():
    net, _ = engine(precision=MixedPrecision(param_dtype=torch.bfloat16))
    plain = Net()
    trained = torch.optim.AdamW(plain.parameters())
    plain(rows(0)).sum().backward()
    trained.step()
    optim = torch.optim.AdamW(net.parameters())
    optim.load_state_dict(trained.state_dict())
    with pytest.raises(ValueError, match=r"exp_avg of first.weight is torch.bfloat16.*make the optimizer by zero.opt"):
        optim.step()


def test_a_step_inside_backward_is_refused():
    net, _ = engine()
    optim = torch.optim.SGD([net.last.weight], lr=0.1)
    net.last.weight.register_post_accumulate_grad_hook(lambda param: optim.step())
    with pytest.raises(RuntimeError, match=r"^step: inside backward"):
        net(rows(0)).sum().backward()


def test_a_sharded_optimizer_over_an_engines_model_is_refused():
    net, _ = engine()
    with pytest.raises(ValueError, match=r"^params: .* of a model under Zero\(\).*use zero.optimizer\(\)"):
        ShardedOptimizer(net.parameters(), torch.optim.SGD, comm=NullCommunicator(2), lr=0.1)


def test_after_remove_an_optimizer_is_an_ordinary_one():
    net, zero = engine(1)
    zero.remove()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    net(rows(0)).sum().backward()
    before = net.first.weight.clone()
    optim.step()
    assert not torch.equal(net.first.weight, before)


@pytest.mark.redundant(but=["3"])
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_average_of_weights_is_that_of_one_process_inside_full_params(stage):
    """It may be made before the engine; a deep copy after it is refused, and names the engine's own average."""
    averaging = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)}

    def go(comm):
        net = Net()
        average = torch.optim.swa_utils.AveragedModel(net, **averaging)
        zero = Zero(net, stage=stage, comm=comm)
        with pytest.raises(RuntimeError, match=r"^copy\.deepcopy\(model\): .*zero\.ema\(\)"):
            torch.optim.swa_utils.AveragedModel(net)
        optim = torch.optim.AdamW(net.parameters(), lr=0.1)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            with zero.full_params():
                average.update_parameters(net)
        return dict(average.module.state_dict())

    plain = Net()
    average = torch.optim.swa_utils.AveragedModel(plain, **averaging)
    optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            (plain(rows(rank, step)).square().mean() / 2).backward()
        optim.step()
        optim.zero_grad()
        average.update_parameters(plain)
    for found in run_threads(go, 2):
        torch.testing.assert_close(found, dict(average.module.state_dict()), rtol=0, atol=1e-6)
