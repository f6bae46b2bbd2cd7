"""Every element-wise optimizer of torch does on pieces what it does on whole tensors; the others are refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nets import Net, Turn, assert_every_stage_equals_one_process, backward, one_process, rows
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, Zero

O = torch.optim  # noqa: E741 -- a table reads better with it
CLASSES = {
    "SGD": (O.SGD, {"lr": 0.1}),
    "SGD momentum": (O.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "SGD nesterov": (O.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": (O.Adam, {"weight_decay": 0.1}),
    "AdamW": (O.AdamW, {}),
    "AdamW amsgrad": (O.AdamW, {"amsgrad": True}),
    "NAdam": (O.NAdam, {}),
    "RAdam": (O.RAdam, {}),
    "RMSprop": (O.RMSprop, {"centered": True, "momentum": 0.5}),
    "Adagrad": (O.Adagrad, {}),
    "Adadelta": (O.Adadelta, {"lr": 1.0}),
    "Adamax": (O.Adamax, {}),
    "ASGD": (O.ASGD, {"lambd": 0.01, "t0": 1}),
    "Rprop": (O.Rprop, {}),
}
FUSED = {"SGD", "SGD momentum", "SGD nesterov", "Adam", "AdamW", "AdamW amsgrad", "Adagrad"}
FORMS = [
    (name, form) for name in CLASSES for form in ("single", "foreach", "fused") if form != "fused" or name in FUSED
]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_optimizers_compute_on_pieces_what_they_compute_on_tensors(name, form):
    cls, kwargs = CLASSES[name]
    forms = {"single": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
    # A sign or a small denominator makes much of a rounding error: the bits of the stages are compared exactly.
    atol = 1e-4 if name in ("Rprop", "Adadelta", "RMSprop", "RAdam", "NAdam") else 1e-5
    assert_every_stage_equals_one_process(Net, num_steps=4, atol=atol, optimizer=cls, **kwargs, **forms[form])


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "SparseAdam", "Muon"])
def test_optimizers_that_need_whole_tensors_are_refused_by_name(name):
    zero = Zero(Net(), comm=NullCommunicator(2))
    with pytest.raises(ValueError, match=f"optimizer_cls: {name} cannot be sharded: it "):
        zero.optimizer(getattr(torch.optim, name))

    class Mine(getattr(torch.optim, name)):
        pass

    with pytest.raises(ValueError, match="Mine cannot be sharded"):
        zero.optimizer(Mine)


def test_the_optimizer_is_exactly_of_the_class_asked_for():
    zero = Zero(Net(), comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.AdamW, lr=0.5)
    assert type(optim) is torch.optim.AdamW
    assert optim.param_groups[0]["lr"] == 0.5
    assert all(shard.dim() == 1 and shard.dtype == torch.float32 for shard in optim.param_groups[0]["params"])


@pytest.mark.parametrize("stage", STAGES)
def test_groups_keep_their_settings(stage):
    def build_groups(model):
        return [
            {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.3, "lr": 0.05},
            {"params": (p for p in model.parameters() if p.dim() == 1), "weight_decay": 0.0},
        ]

    def expected():
        net = Net()
        optim = torch.optim.AdamW(build_groups(net), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        for step in range(3):
            for rank in range(2):
                (net(rows(rank, step)).square().mean() / 2).backward()
            optim.step()
            scheduler.step()
            optim.zero_grad()
        return net.state_dict()

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW, build_groups(net), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
            scheduler.step()
            optim.zero_grad()
        assert [group["lr"] for group in optim.param_groups] == [0.05 / 8, 0.01 / 8]
        return zero.state_dict()

    torch.testing.assert_close(dict(run_threads(go, 2)[1]), dict(expected()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_group_may_be_added_later(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, net.blocks.parameters(), lr=0.1)
        before = zero.state_dict()
        for step in range(2):
            net(rows(comm.rank)).square().mean().backward()
            optim.step()
            optim.zero_grad()
            after = zero.state_dict()
            assert torch.equal(after["first.weight"], before["first.weight"]) == (step == 0)
            if step == 0:
                zero.zero_grad()
                optim.add_param_group({"params": net.first.parameters(), "lr": 0.2})
        assert torch.equal(after["last.weight"], before["last.weight"])
        with pytest.raises(ValueError, match="is in two groups"):
            optim.add_param_group({"params": net.first.parameters()})

    run_threads(go, 2)


@pytest.mark.parametrize("positional", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_step_takes_a_closure(stage, positional):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        losses = []
        for step in range(3):

            def closure(step=step):
                optim.zero_grad()
                loss = net(rows(comm.rank, step)).square().mean()
                loss.backward()
                return loss

            loss = optim.step(closure) if positional else optim.step(closure=closure)
            losses.append(loss.item())
        return losses, zero.state_dict()

    torch.testing.assert_close(dict(run_threads(go, 2)[0][1]), one_process(Net), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_two_optimizers_share_a_model(stage):
    """Each steps and forgets its own parameters."""

    def go(comm_or_none):
        net = Net()
        zero = None if comm_or_none is None else Zero(net, stage=stage, comm=comm_or_none)
        make = torch.optim.SGD if zero is None else lambda params, **kw: zero.optimizer(torch.optim.SGD, params, **kw)
        first = make([*net.first.parameters(), net.blocks[0].weight], lr=0.1, momentum=0.9)
        second = make([*net.last.parameters(), net.blocks[0].bias, *net.blocks[1:].parameters()], lr=0.01)
        for step in range(4):
            ranks = range(2) if comm_or_none is None else [comm_or_none.rank]
            for rank in ranks:
                (net(rows(rank, step)).square().mean() / len(ranks)).backward()
            first.step()
            first.zero_grad()
            if step % 2:
                second.step()  # with what two backwards have accumulated
                second.zero_grad()
        return dict(net.state_dict() if zero is None else zero.state_dict())

    torch.testing.assert_close(run_threads(go, 2)[0], go(None), rtol=0, atol=1e-6)


def test_named_parameters_do_as_well():
    net = Net()
    optim = Zero(net, comm=LocalCommunicator()).optimizer(torch.optim.SGD, net.named_parameters(), lr=0.1)
    assert sum(shard.numel() for shard in optim.param_groups[0]["params"]) == sum(p.numel() for p in net.parameters())


def test_parameters_that_cannot_be_used_are_refused_in_words():
    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    wrong = [
        ([], ValueError, "params: the optimizer got an empty list"),
        (net.first.weight, TypeError, "params: give an iterable of parameters"),
        ([{"params": set(net.parameters())}], TypeError, "params: a set has no order"),
        (["first.weight"], TypeError, "params: a str is no parameter"),
        ([nn.Parameter(torch.ones(2))], ValueError, r"a tensor of shape \(2,\) is no parameter of the model"),
        ([net.first.weight, net.first.weight], ValueError, "is in two groups"),
        ([{"params": [net.first.weight]}, {"params": [net.first.weight]}], ValueError, "is in two groups"),
    ]
    for params, error, message in wrong:
        with pytest.raises(error, match=message):
            zero.optimizer(torch.optim.SGD, params, lr=0.1)
    with pytest.raises(TypeError, match=r"optimizer_cls: .* is not a torch.optim.Optimizer class"):
        zero.optimizer("AdamW")
    with pytest.raises(ValueError, match="Invalid learning rate"):
        zero.optimizer(torch.optim.SGD, lr=-1.0)
    zero.optimizer(torch.optim.SGD, lr=0.1)  # what was refused has taken nothing
    with pytest.raises(ValueError, match="is in two groups"):
        zero.optimizer(torch.optim.SGD, lr=0.1)


FORGET = {
    "optim.zero_grad()": lambda turn: turn.optim.zero_grad(),
    "optim.zero_grad(set_to_none=False)": lambda turn: turn.optim.zero_grad(set_to_none=False),
    "model.zero_grad()": lambda turn: turn.model.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda turn: turn.model.zero_grad(set_to_none=False),
    "zero.zero_grad()": lambda turn: turn.zero.zero_grad(),
}


@pytest.mark.parametrize("waiting", [False, True], ids=["reduced", "not yet reduced"])
@pytest.mark.parametrize("form", FORGET)
def test_gradients_are_forgotten_in_every_form(form, waiting):
    def take_turn(turn: Turn) -> None:
        assert turn.zero is not None
        if waiting:
            with turn.zero.no_sync():
                turn.loss().backward()
        else:
            turn.loss().backward()
        FORGET[form](turn)
        turn.loss().backward()

    assert_every_stage_equals_one_process(Net, take_turn, plain_turn=backward, zero_kwargs={"accumulate": "sharded"})


@pytest.mark.parametrize("stage", STAGES)
def test_zeroed_gradients_are_stepped_and_forgotten_ones_are_not(stage):
    def moved(set_to_none):
        net = Net()
        zero = Zero(net, stage=stage, comm=LocalCommunicator())
        optim = zero.optimizer(torch.optim.SGD, lr=0.1, weight_decay=0.5)
        net(rows(0)).sum().backward()
        before = zero.state_dict()["first.weight"]
        optim.zero_grad(set_to_none=set_to_none)
        optim.step()
        return not torch.equal(before, zero.state_dict()["first.weight"])

    assert moved(set_to_none=False)
    assert not moved(set_to_none=True)


def test_gradients_that_nobody_forgets_add_up():
    def build_and_train(comm, stage):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
        optim.step()  # and are there for another step
        return dict(zero.state_dict())

    net = Net()
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        for rank in range(2):
            (net(rows(rank, step)).square().mean() / 2).backward()
        optim.step()
    optim.step()
    for stage in STAGES:
        found = run_threads(lambda comm, stage=stage: build_and_train(comm, stage), 2)[0]
        torch.testing.assert_close(found, dict(net.state_dict()), rtol=0, atol=1e-6)
