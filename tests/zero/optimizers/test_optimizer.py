"""Every optimizer of torch does on pieces, or on the tensors that a rank owns, what it does on all; or is refused."""

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from nets import Net, matrices, one_process, others, rows, set_values
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.zero import STAGES, Zero


@pytest.mark.parametrize("name", ["LBFGS", "SparseAdam"])
def test_optimizers_that_no_layout_suits_are_refused_by_name_and_change_nothing(name):
    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    groups = [group for unit in zero.units for group in unit.groups]
    with pytest.raises(ValueError, match=f"optimizer_cls: {name} cannot be sharded: it "):
        zero.optimizer(getattr(torch.optim, name))

    class Mine(getattr(torch.optim, name)):
        pass

    with pytest.raises(ValueError, match="Mine cannot be sharded"):
        zero.optimizer(Mine)
    assert [group for unit in zero.units for group in unit.groups] == groups
    zero.optimizer(torch.optim.SGD, lr=0.1)  # nor are parameters taken


def test_the_optimizer_is_exactly_of_the_class_asked_for():
    zero = Zero(Net(), comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.AdamW, zero.model.named_parameters(), lr=0.5)
    assert type(optim) is torch.optim.AdamW
    assert optim.param_groups[0]["lr"] == 0.5
    assert len(zero.pieces(optim)) > 0
    assert all(piece.dim() == 1 and piece.dtype == torch.float32 for piece in zero.pieces(optim))


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:model.parameters")  # which are members here, whatever their values
def test_param_groups_hold_the_models_parameters_but_for_the_classes_own_code():
    seen = {}

    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            seen["step"] = self.param_groups[0]["params"]
            return super().step(closure)

    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    optim = zero.optimizer(Looking, lr=0.1)
    optim.register_step_pre_hook(lambda optim, *_: seen.setdefault("before", optim.param_groups[0]["params"]) and None)
    optim.register_step_post_hook(lambda optim, *_: seen.update(after=optim.param_groups[0]["params"]))

    def closure():
        seen["closure"] = optim.param_groups[0]["params"]
        net(rows(0)).sum().backward()

    optim.step(closure)
    members = list(net.parameters())
    for place in ("before", "closure", "after"):
        assert [id(param) for param in seen[place]] == [id(param) for param in members], place
    assert [id(piece) for piece in seen["step"]] == [id(piece) for piece in zero.pieces()]


class Averaging(torch.optim.AdamW):
    """Goes on after the step of the class that it extends."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(0.9)
                self.state[param].setdefault("average", torch.zeros_like(param)).lerp_(param, 0.25)
        return loss


@pytest.mark.redundant(but=["True-1", "True-2", "True-3"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("adopted", [False, True])
def test_what_a_class_does_after_the_step_that_it_extends_is_done_to_pieces(stage, adopted):
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])  # from now on torch runs hooks around the inner step too
    shapes = [param.shape for param in Net().parameters()]

    def train(net, optim, ranks):
        losses = []  # as a hook sees the weights: updated already after the inner step, and otherwise after the outer

        def look(optim, *_):
            assert [param.shape for param in optim.param_groups[0]["params"]] == shapes
            with torch.no_grad():
                losses.append(net(rows(0)).square().mean())

        optim.register_step_pre_hook(look)
        optim.register_step_post_hook(look)
        for step in range(2):
            for rank in ranks:
                (net(rows(rank, step)).square().mean() / len(ranks)).backward()
            optim.step()
            optim.zero_grad()
        return torch.stack(losses)

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        optim = Averaging(net.parameters(), lr=0.1) if adopted else zero.optimizer(Averaging, lr=0.1)
        return train(net, optim, [comm.rank]), zero.state_dict(), zero.optim_state_dict(optim)["state"]

    net = Net()
    optim = Averaging(net.parameters(), lr=0.1)
    expected = train(net, optim, [0, 1])
    assert len(expected.unique()) == 5  # two inner and two outer steps, and before them
    for losses, weights, state in run_threads(go, 2):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        for name, weight in net.state_dict().items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
        for number, kept in optim.state_dict()["state"].items():
            torch.testing.assert_close(state[number]["average"], kept["average"], rtol=1e-5, atol=1e-6)


@pytest.mark.redundant(but=["3"])
@pytest.mark.parametrize("stage", STAGES)
def test_what_a_class_of_ones_own_moves_without_a_gradient_is_seen_by_the_next_forward(stage):
    class Decays(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(1 - group["lr"])

    def train(net, optim):
        net.path = lambda net, x: net.blocks[0](x)  # no other block has gradients
        net(rows(0)).sum().backward()
        optim.step()
        net.path = lambda net, x: net.blocks[2](net.blocks[1](x))
        with torch.no_grad():
            return net(rows(0))

    def go(comm):
        net = Net()
        return train(net, Zero(net, stage=stage, comm=comm).optimizer(Decays, lr=0.5))

    net = Net()
    expected = train(net, Decays(net.parameters(), lr=0.5))
    for found in run_threads(go, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.redundant
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_fails_leaves_the_models_parameters_in_the_groups(scheduled):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            if self.param_groups[0]["lr"] == 0.3:
                raise ArithmeticError
            return super().step(closure)

    net = Net()
    if scheduled:  # which has put a step of its own in
        optim = Failing(net.parameters(), lr=0.1)
        torch.optim.lr_scheduler.StepLR(optim, 1)
        Zero(net, comm=NullCommunicator(2))
        net(rows(0)).sum().backward()
        optim.step()
    else:
        optim = Zero(net, comm=NullCommunicator(2)).optimizer(Failing, lr=0.1)
    optim.param_groups[0]["lr"] = 0.3
    with pytest.raises(ArithmeticError):
        optim.step()
    assert optim.param_groups[0]["params"][0] is net.first.weight


@pytest.mark.parametrize("change", [list.pop, lambda params: params.append(params[0]), lambda params: params.reverse()])
def test_groups_that_were_changed_by_hand_are_refused(change):
    net = Net()
    optim = Zero(net, comm=NullCommunicator(2)).optimizer(torch.optim.SGD, lr=0.1)
    change(optim.param_groups[0]["params"])
    with pytest.raises(ValueError, match=r"^param_groups: .*use optimizer.add_param_group"):
        optim.step()


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_methods_of_the_classes_own_work_on_pieces_and_change_the_weights(stage):
    class WithEval(torch.optim.SGD):
        def halve(self):
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.mul_(0.5)

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        zero.optimizer(WithEval, lr=0.1).halve()
        return net(rows(comm.rank)).sum().item(), zero.state_dict()["first.weight"]

    plain = Net()
    for param in plain.parameters():
        param.data.mul_(0.5)
    for rank, (total, weight) in enumerate(run_threads(go, 2)):
        assert total == pytest.approx(plain(rows(rank)).sum().item(), rel=1e-5)
        assert torch.equal(weight, plain.first.weight)


@pytest.mark.redundant
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

    torch.testing.assert_close(dict(run_threads(go, 2)[0][1]), one_process(Net, num_steps=3), rtol=0, atol=1e-6)


@pytest.mark.redundant
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
    with pytest.raises(TypeError, match=r"^optimizer_cls: an AdamW object is not a torch.optim.Optimizer class; give "):
        zero.optimizer(torch.optim.AdamW(net.parameters()))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        zero.optimizer(torch.optim.SGD, lr=-1.0)
    zero.optimizer(torch.optim.SGD, lr=0.1)  # what was refused has taken nothing
    with pytest.raises(ValueError, match="is in two groups"):
        zero.optimizer(torch.optim.SGD, lr=0.1)


@pytest.mark.redundant
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


# -- whole tensors ------------------------------------------------------------------------------------------------


def block():
    return nn.Sequential(nn.Linear(6, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, 6))


def build_net():
    net = Net(2, block)
    net.extra = nn.Parameter(torch.ones(3, 5))  # never used
    net.blocks[1][3].weight.requires_grad_(False)
    net.last.weight = net.first.weight
    set_values(net)
    return net


def two_optimizers(net, make, order=("Muon", "AdamW")):
    """Muon for the matrices, another for the rest, made in either order."""
    made = {
        "Muon": lambda: make(torch.optim.Muon, matrices(net), lr=0.05),
        "AdamW": lambda: make(torch.optim.AdamW, others(net), lr=0.01),
        "Adagrad": lambda: make(torch.optim.Adagrad, others(net), lr=0.01),
    }
    return [made[name]() for name in order]


def train_two(comm, *, stage=0, order=("Muon", "AdamW"), num_micro=1, world_size=2, **zero_kwargs):
    """Weights and norms; without ``comm`` one process that sees every rank's rows."""
    net = build_net()
    zero = None if comm is None else Zero(net, stage=stage, comm=comm, **zero_kwargs)
    optims = two_optimizers(net, (lambda cls, *args, **kw: cls(*args, **kw)) if zero is None else zero.optimizer, order)
    ranks = range(world_size) if comm is None else [comm.rank]
    norms = []
    for step in range(3):
        for micro in range(num_micro):
            for rank in ranks:
                loss = net(rows(rank, step * num_micro + micro)).square().mean() / (num_micro * len(ranks))
                loss.backward()
        clip = nn.utils.clip_grad_norm_ if zero is None else None
        norms.append((clip(net.parameters(), 0.5) if clip else zero.clip_grad_norm_(0.5)).item())
        for optim in optims:
            optim.step()
        for optim in optims:
            optim.zero_grad()
    return dict(net.state_dict() if zero is None else zero.state_dict()), norms


@pytest.mark.redundant(but=["5-Muon+AdamW"])
@pytest.mark.pairwise("world_size")
@pytest.mark.parametrize("order", [("Muon", "AdamW"), ("AdamW", "Muon"), ("Adagrad", "Muon")], ids="+".join)
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])  # at 5 shards end with what each rank owns
def test_two_optimizers_one_of_whole_tensors_step_as_in_one_process(world_size, order):
    expected, expected_norms = train_two(None, order=order, world_size=world_size)
    first = None
    for stage in STAGES:
        by_rank = run_threads(lambda comm, stage=stage: train_two(comm, stage=stage, order=order), world_size)
        first = first or by_rank[0]
        for weights, norms in by_rank:
            assert norms == first[1]
            assert norms == pytest.approx(expected_norms, abs=1e-6)
            for name, whole in expected.items():
                assert torch.equal(weights[name], first[0][name]), (stage, name)
                torch.testing.assert_close(weights[name], whole, rtol=0, atol=1e-6)


@pytest.mark.redundant(but=["3"])
@pytest.mark.parametrize("stage", STAGES)
def test_an_owner_sees_whole_matrices_in_their_shapes_and_others_nothing(stage):
    def go(comm):
        net = build_net()
        zero = Zero(net, stage=stage, comm=comm)
        before = zero.state_dict()
        muon, adamw = two_optimizers(net, zero.optimizer)
        after = zero.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
        assert type(muon) is torch.optim.Muon
        assert all(piece.dim() == 1 for piece in zero.pieces(adamw))
        return [tuple(piece.shape) for piece in zero.pieces(muon)]

    shapes = [tuple(param.shape) for param in matrices(build_net())]
    by_rank = run_threads(go, 3)
    if stage == 0:
        assert by_rank == [shapes] * 3
    else:
        assert sorted(shape for rank in by_rank for shape in rank) == sorted(shapes)
        assert min(len(rank) for rank in by_rank) >= len(shapes) // 3  # not each unit's first to the same rank


def test_what_a_class_refuses_by_shape_leaves_the_layout_as_it_was():
    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    groups = [group for unit in zero.units for group in unit.groups]
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        zero.optimizer(torch.optim.Muon)
    assert [group for unit in zero.units for group in unit.groups] == groups
    zero.optimizer(torch.optim.Muon, matrices(net))


class ByFlag(torch.optim.Optimizer):
    """SGD, normalised by tensors where the group says so."""

    def __init__(self, params, lr=0.1, whole=False):
        super().__init__(params, {"lr": lr, "whole": whole})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    norm = param.grad.norm() if group["whole"] else 1.0
                    param.add_(param.grad / norm, alpha=-group["lr"])


@pytest.mark.redundant(but=["0"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.filterwarnings("ignore:model.parameters")  # which are members here, whatever their values
def test_each_group_of_ones_own_class_gets_the_layout_that_it_needs(stage):
    def go(comm):
        net = build_net()
        zero = None if comm is None else Zero(net, stage=stage, comm=comm)
        groups = [{"params": matrices(net)[:3], "whole": True}, {"params": others(net), "lr": 0.2}]
        optim = ByFlag(groups) if zero is None else zero.optimizer(ByFlag, groups)
        for step in range(3):
            for rank in range(2) if comm is None else [comm.rank]:
                (net(rows(rank, step)).square().mean() / (2 if comm is None else 1)).backward()
            optim.step()
            optim.zero_grad()
            if step == 0:
                optim.add_param_group({"params": matrices(net)[3:]})
        if zero is not None:
            whole = {param.shape for param in matrices(net)[:3]}
            assert all(piece.dim() == 1 or piece.shape in whole for piece in zero.pieces(optim))
        return dict(net.state_dict() if zero is None else zero.state_dict())

    torch.testing.assert_close(run_threads(go, 2)[1], go(None), rtol=0, atol=1e-6)


@pytest.mark.redundant(but=["0"])
@pytest.mark.parametrize("stage", STAGES)
def test_whole_tensors_may_join_later_where_nobody_else_has_state(stage):
    def go(comm):
        net = build_net()
        zero = None if comm is None else Zero(net, stage=stage, comm=comm)
        make = torch.optim.Muon if zero is None else lambda params, **kw: zero.optimizer(torch.optim.Muon, params, **kw)
        optim = make([net.first.weight], lr=0.05)
        for step in range(4):
            for rank in range(2) if comm is None else [comm.rank]:
                (net(rows(rank, step)).square().mean() / (2 if comm is None else 1)).backward()
            optim.step()
            net.zero_grad()
            if step == 1:
                optim.add_param_group({"params": [net.blocks[0][0].weight, net.blocks[0][3].weight], "lr": 0.1})
                net.blocks[1][3].weight.requires_grad_(True)
                optim.add_param_group({"params": net.blocks[1][3].weight})
        return dict(net.state_dict() if zero is None else zero.state_dict())

    torch.testing.assert_close(run_threads(go, 2)[1], go(None), rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:model.parameters")  # which are members here, whatever their values
def test_what_cannot_move_is_said_before_it_moves():
    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    groups = [group for unit in zero.units for group in unit.groups]
    make = lambda: zero.optimizer(torch.optim.Muon, matrices(net))  # noqa: E731
    net(rows(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer: .* gradients of the step under way"):
        make()
    zero.zero_grad()
    with zero.no_sync():
        net(rows(0)).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer: .* gradients of the step under way"):
        make()
    zero.zero_grad()
    with zero.full_params(), pytest.raises(RuntimeError, match=r"outside full_params\(\)"):
        make()
    adamw = zero.optimizer(torch.optim.AdamW, others(net))
    net(rows(0)).sum().backward()
    adamw.step()
    zero.zero_grad()
    with pytest.raises(RuntimeError, match="AdamW has state of parameters beside them; make such optimizers"):
        make()
    assert [group for unit in zero.units for group in unit.groups] == groups
    net = Net()
    zero = Zero(net, comm=NullCommunicator(2))
    zero.optimizer(torch.optim.AdamW, others(net)).load_state_dict(torch.optim.AdamW(others(net)).state_dict())
    with pytest.raises(RuntimeError, match="AdamW has state of parameters beside them"):
        make()


@pytest.mark.parametrize("stage", STAGES)
def test_a_graph_from_before_the_layout_changed_is_refused_by_autograd(stage):
    net = Net()
    zero = Zero(net, stage=stage, comm=NullCommunicator(2))
    loss = net(rows(0)).sum()
    zero.optimizer(torch.optim.Muon, matrices(net))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    zero.zero_grad()
    net(rows(0)).sum().backward()


def test_a_model_from_the_meta_device_keeps_its_values():
    def init(name, tensor):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))

    def go(comm, stage):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        zero = Zero(net, stage=stage, units=list(net), comm=comm, init=init)
        zero.optimizer(torch.optim.Muon, matrices(net))
        return zero.state_dict()

    for stage in STAGES:
        for tensor in run_threads(lambda comm, stage=stage: go(comm, stage), 2)[0].values():
            assert torch.equal(tensor, torch.arange(float(tensor.numel())).view(tensor.shape))


def test_an_optimizer_that_calls_its_closure_twice_is_stopped():
    class Twice(torch.optim.SGD):
        zero_reach = "element-wise"  # else it is tried, and the closure is refused

        def step(self, closure=None):
            loss = super().step(closure)
            return closure() if closure else loss

    net = Net()
    optim = Zero(net, comm=NullCommunicator(2)).optimizer(Twice, lr=0.1)

    def closure():
        loss = net(rows(0)).square().mean()
        loss.backward()
        return loss

    with pytest.raises(RuntimeError, match="calls its closure a second time"):
        optim.step(closure)


@pytest.mark.redundant(but=["True-0"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("adopted", [False, True])
def test_a_state_asked_for_by_the_models_parameter_is_refused_and_one_by_its_piece_is_there(stage, adopted):
    net = Net()
    zero = Zero(net, stage, comm=NullCommunicator(1))
    make = partial(torch.optim.AdamW, net.parameters()) if adopted else partial(zero.optimizer, torch.optim.AdamW)
    optim = make(lr=0.1)
    for _ in range(2):
        net(rows(0)).sum().backward()
        optim.step()
        with pytest.raises(RuntimeError, match=r"^optimizer\.state: .* zero\.pieces\(optimizer\)"):
            optim.state[net.last.weight]["exp_avg"].zero_()
        assert all("exp_avg" in optim.state[piece] for piece in zero.pieces(optim))
        assert len(optim.state) == len(zero.pieces(optim))
        optim.load_state_dict(zero.optim_state_dict(optim))  # which puts another dict there
    for twin in (copy.deepcopy(optim.state), pickle.loads(pickle.dumps(optim.state))):
        assert twin["new"] == {}
