"""``param.grad`` under an engine is the mean over ranks, and torch's own tools get one process's numbers from it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nets import Net, rows
from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.runtime.sharded_grad import ShardedGrad

WORLD = 2


def plain_net(world_size: int = WORLD, step: int = 0) -> Net:
    net = Net()
    for rank in range(world_size):
        (net(rows(rank, step)).square().mean() / world_size).backward()
    return net


def on_ranks(
    use: Any, stage: int, world_size: int = WORLD, optimizer: Any = torch.optim.SGD, **kwargs: Any
) -> list[Any]:
    """``use(net, zero, optim)`` after one backward, by rank."""

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm, **kwargs)
        optim = zero.optimizer(optimizer, lr=0.1)
        net(rows(comm.rank)).square().mean().backward()
        return use(net, zero, optim)

    return run_threads(go, world_size)


def grads_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in net.named_parameters()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert not isinstance(found[name], ShardedGrad)
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


READS = {
    "numpy": lambda grad: torch.from_numpy(grad.detach().cpu().numpy()),
    "tolist": lambda grad: torch.tensor(grad.tolist()),
    "functional": lambda grad: (2 * grad + 1).abs().sqrt(),
    "views": lambda grad: torch.cat([grad.view(-1)[1:3], grad.flatten()[:1], grad.reshape(-1).data[-1:]]),
    "split": lambda grad: torch.cat(list(grad.view(-1).split(4)[::-1])),
    "statistics": lambda grad: torch.stack([grad.mean(), grad.max(), grad.std(), grad.abs().max(), grad.norm(1)]),
    "finite": lambda grad: torch.stack([torch.isfinite(grad).all(), torch.isnan(grad).any()]),
    "norms": lambda grad: torch.stack([grad.norm(), torch.norm(grad, 3), grad.norm(math.inf), grad.norm(0)]),
    "norm along": lambda grad: torch.linalg.vector_norm(grad, dim=-1),
    "deepcopy": copy.deepcopy,
    "histogram": lambda grad: torch.histc(grad, 5, -1.0, 1.0),
    "product with a plain one": lambda grad: torch.ones(grad.shape).mul_(grad),
    "like": lambda grad: torch.ones_like(grad),
}


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("stage", STAGES)
def test_whatever_reads_it_gets_the_numbers_of_one_process(stage):
    def read(net, *_):
        return {name: read(net.first.weight.grad) for name, read in READS.items()}

    for world_size in (1, 2, 3):
        for found in on_ranks(read, stage, world_size):
            assert all(type(value) is Tensor for value in found.values())
            assert_close(found, read(plain_net(world_size)))


@pytest.mark.redundant
@pytest.mark.pairwise("norm_type", "foreach")
@pytest.mark.parametrize(("norm_type", "foreach"), [(2.0, None), (1.0, False), (math.inf, True), (2.0, False)])
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_clipping_is_by_the_global_norm(stage, norm_type, foreach):
    plain = plain_net(3)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
    by_rank = on_ranks(
        lambda net, zero, optim: (
            nn.utils.clip_grad_norm_(net.parameters(), 0.05, norm_type, error_if_nonfinite=True, foreach=foreach),
            grads_of(net),
        ),
        stage,
        3,
    )
    for norm, found in by_rank:
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        assert torch.equal(norm, by_rank[0][0])
        assert_close(found, grads_of(plain))


def _from_one_vector(params):
    vector = torch.cat([param.grad.view(-1) for param in params])
    vector /= vector.norm()
    for param, part in zip(params, vector.split([param.numel() for param in params]), strict=True):
        param.grad.data = part.view_as(param)


CHANGES = {
    "clip_grad_value_": lambda params: nn.utils.clip_grad_value_(params, 0.02),
    "clip_grad_value_ foreach=False": lambda params: nn.utils.clip_grad_value_(params, 0.02, foreach=False),
    "clip_grads_with_norm_": lambda params: nn.utils.clip_grads_with_norm_(
        params, 0.05, nn.utils.get_total_norm([param.grad for param in params])
    ),
    "grad.data.mul_": lambda params: [param.grad.data.mul_(0.5) for param in params],
    "grad /= 2": lambda params: [param.grad.div_(torch.tensor(2.0)) for param in params],
    "weight decay": lambda params: [param.grad.add_(torch.full(param.shape, 0.25), alpha=0.1) for param in params],
    "broadcast": lambda params: [param.grad.mul_(torch.arange(6.0)) for param in params],
    "foreach": lambda params: torch._foreach_add_([p.grad for p in params], [torch.ones(p.shape) for p in params]),
    "foreach with itself": lambda params: torch._foreach_mul_([p.grad for p in params], [p.grad for p in params]),
    "zero_": lambda params: [param.grad.zero_() for param in params],
    "item": lambda params: [param.grad.view(-1).__setitem__(3, 7.0) for param in params],
    "mask": lambda params: [param.grad.__setitem__(param.grad > 0, 0.0) for param in params],
    "rows": lambda params: [param.grad.__setitem__(0, 0.0) for param in params],
    "nan_to_num_": lambda params: [param.grad.nan_to_num_() for param in params],
    "assigned": lambda params: [setattr(param, "grad", param.grad * 3) for param in params],
    "assigned to its data": lambda params: [setattr(param.grad, "data", param.grad.data * 3) for param in params],
    "data from one vector": _from_one_vector,
    "assigned one of another": lambda params: setattr(params[0], "grad", params[2].grad),
    "None": lambda params: [setattr(param, "grad", None) for param in params[1:]],
    "centred": lambda params: [param.grad.sub_(param.grad.mean()) for param in params],
    "out": lambda params: [torch.mul(param.grad, 2, out=param.grad) for param in params],
}


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_whatever_changes_it_changes_the_step(stage):
    def changed(change, net, zero, optim):
        with torch.no_grad():
            change(list(net.parameters()))
        optim.step()
        return dict(net.state_dict() if zero is None else zero.state_dict())

    def go(comm):
        found = {}
        for name, change in CHANGES.items():
            net = Net()
            zero = Zero(net, stage=stage, comm=comm)
            optim = zero.optimizer(torch.optim.SGD, lr=0.1)
            net(rows(comm.rank)).square().mean().backward()
            found[name] = changed(change, net, zero, optim)
        return found

    by_rank = run_threads(go, 3)
    for name, change in CHANGES.items():
        plain = plain_net(3)
        expected = changed(change, plain, None, torch.optim.SGD(plain.parameters(), lr=0.1))
        for found in by_rank:
            assert_close(found[name], expected)


def test_what_is_assigned_to_its_data_leaves_it_a_gradient_without_a_graph():
    def use(net, zero, optim):
        net.first.weight.grad.data = net.last.weight * 2
        with pytest.raises(RuntimeError, match="invalid for input of size 36"):
            net.first.bias.grad.data = net.last.weight
        assert not net.first.weight.grad.requires_grad
        return net.first.weight.grad - 2 * net.last.weight

    for found in on_ranks(use, 2):
        assert not found.any()


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_16_bit_weights_show_gradients_in_their_masters_dtype(stage):
    def use(net, zero, optim):
        assert net.first.weight.dtype == torch.bfloat16
        assert net.first.weight.grad.dtype == torch.float32
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
        assert norm == zero.clip_grad_norm_(1e9)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        return norm, {name: grad.clone() for name, grad in zero.full_grads().items()}

    by_rank = on_ranks(use, stage, precision=MixedPrecision(param_dtype=torch.bfloat16))
    for norm, found in by_rank:
        assert norm.dtype == torch.float32
        assert sum(float(grad.square().sum()) for grad in found.values()) ** 0.5 == pytest.approx(0.05, rel=1e-4)


@pytest.mark.redundant
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_micro_batches_add_up_and_are_shown_when_they_are_reduced(stage, accumulate):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm, accumulate=accumulate)
        for micro in range(3):
            with zero.micro_batch(last=micro == 2):
                net(rows(comm.rank, micro)).square().mean().backward()
            if micro < 2 and accumulate == "local":
                assert net.first.weight.grad is not None
                with pytest.raises(RuntimeError, match=r"first.weight.grad: gradients accumulated under no_sync"):
                    net.first.weight.grad.norm()
        return grads_of(net)

    plain = Net()
    for micro in range(3):
        for rank in range(2):
            (plain(rows(rank, micro)).square().mean() / 2).backward()
    for found in run_threads(go, 2):
        assert_close(found, grads_of(plain))


FORGET = {
    "the optimizer's": lambda net, zero, optim: optim.zero_grad(),
    "the optimizer's, to zero": lambda net, zero, optim: optim.zero_grad(set_to_none=False),
    "the engine's": lambda net, zero, optim: zero.zero_grad(),
    "the model's": lambda net, zero, optim: net.zero_grad(),
    "Sequential": lambda net, zero, optim: nn.Sequential(net).zero_grad(),
    "Sequential, to zero": lambda net, zero, optim: nn.Sequential(net).zero_grad(set_to_none=False),
    "parts": lambda net, zero, optim: [part.zero_grad() for part in (net.first, net.blocks, net.last)],
    "compiled": lambda net, zero, optim: torch.compile(net, backend="eager").zero_grad(),
    "by hand": lambda net, zero, optim: [setattr(param, "grad", None) for param in net.parameters()],
    "zero_ by hand": lambda net, zero, optim: [param.grad.zero_() for param in net.parameters()],
    "a new optimizer's": lambda net, zero, optim: torch.optim.SGD(net.parameters(), lr=0.1).zero_grad(),
}


@pytest.mark.redundant
@pytest.mark.pairwise("stage")
@pytest.mark.parametrize("waiting", [False, True], ids=["reduced", "not yet reduced"])
@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.soak), 2, 3])
def test_gradients_are_forgotten_in_every_form(stage, waiting):
    def go(comm):
        found = {}
        for name, forget in FORGET.items():
            net = Net()
            zero = Zero(net, stage=stage, comm=comm, accumulate="sharded")
            optim = zero.optimizer(torch.optim.SGD, lr=0.1)
            with zero.no_sync() if waiting else zero.micro_batch(last=True):
                net(rows(comm.rank, 7)).square().mean().backward()
            forget(net, zero, optim)
            net(rows(comm.rank)).square().mean().backward()
            found[name] = grads_of(net)
        return found

    for by_form in run_threads(go, 2):
        for found in by_form.values():
            assert_close(found, grads_of(plain_net()))


def test_a_part_is_forgotten_and_the_rest_is_not():
    def go(comm):
        net = Net()
        zero = Zero(net, stage=2, comm=comm)
        net(rows(comm.rank)).square().mean().backward()
        grad = net.blocks[1].weight.grad
        net.blocks[1].zero_grad()
        gone = {name for name, found in zero.full_grads().items() if found is None}
        with pytest.raises(RuntimeError, match=r"blocks.1.weight.grad: gradients were cleared; take a copy"):
            grad.norm()
        return gone

    assert run_threads(go, 2) == [{"blocks.1.weight", "blocks.1.bias"}] * 2


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad.detach(), lambda grad: grad.view(-1)])
def test_a_gradient_that_was_kept_over_a_step_raises_and_does_not_show_the_next_one(keep):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=1, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(2):
            net(rows(comm.rank, step)).square().mean().backward()
            if step == 0:
                old = keep(net.first.weight.grad)
                optim.step()
                optim.zero_grad()
        with pytest.raises(RuntimeError, match=r"first.weight.grad: gradients were cleared"):
            old.sum()

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_gradient_shows_none_and_one_that_others_have_shows_it(stage):
    def go(comm):
        net = Net(path=lambda net, x: net.blocks[0](x) if comm.rank else x)
        Zero(net, stage=stage, comm=comm)
        net(rows(comm.rank)).square().mean().backward()
        assert net.blocks[1].weight.grad is None
        return net.blocks[0].weight.grad.norm()

    norms = run_threads(go, 2)
    assert norms[0] == norms[1] > 0


def test_inside_backward_a_gradient_is_a_promise_that_raises():
    def go(comm):
        net = Net()
        Zero(net, stage=2, comm=comm)
        told = []

        def after(param):
            with pytest.raises(RuntimeError, match=r"last.weight.grad: inside backward a gradient is this rank's own"):
                param.grad.norm()
            told.append(param.grad is not None)

        net.last.weight.register_post_accumulate_grad_hook(after)
        net(rows(comm.rank)).square().mean().backward()
        net(rows(comm.rank)).square().mean().backward()
        net.last.bias.register_post_accumulate_grad_hook(lambda param: param.grad.add_(1.0))
        with pytest.raises(RuntimeError, match=r"inside backward"):
            net(rows(comm.rank)).square().mean().backward()
        return told

    assert run_threads(go, 2) == [[True, True]] * 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_a_graph_of_its_own_is_refused_where_it_would_be_missed():
    def go(comm):
        net = Net()
        Zero(net, stage=2, comm=comm)
        net(rows(comm.rank)).square().mean().backward(create_graph=True)
        with pytest.raises(RuntimeError, match=r"first.weight.grad: it has no graph of its own"):
            net.first.weight.grad.square().sum()
        with torch.no_grad():
            return net.first.weight.grad.norm()

    norms = run_threads(go, 2)
    torch.testing.assert_close(norms[0], plain_net().first.weight.grad.norm())


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_a_penalty_on_weights_adds_its_gradient_before_anything_else(stage):
    """Autograd has the penalty's gradient before the model's outputs have theirs."""

    def go(comm_or_none):
        net = Net()
        if comm_or_none is None:
            for _ in range(2):
                for rank in range(2):
                    (net(rows(rank)).square().mean() / 2).backward()
                    (net.first.weight.square().sum() / 2).backward()
            return grads_of(net)
        zero = Zero(net, stage=stage, comm=comm_or_none)
        for _ in range(2):
            net(rows(comm_or_none.rank)).square().mean().backward()
            with zero.full_params():
                net.first.weight.square().sum().backward()
        return grads_of(net)

    for found in run_threads(go, 2):
        assert_close(found, go(None))


def test_measuring_all_gradients_is_one_message():
    def go(comm):
        observed = ObservedCommunicator(comm)
        net = Net()
        Zero(net, stage=3, comm=observed)
        net(rows(comm.rank)).square().mean().backward()
        before = len(observed.records)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        return len(observed.records) - before

    assert run_threads(go, 2) == [1, 1]


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("made_by", ["the engine", "hand"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_torchs_scaler_skips_a_step_on_all_ranks_when_one_has_overflowed(stage, fused, made_by):
    def train(net, optim, losses):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        scales = []
        for step in range(4):
            for loss in losses(step):
                scaler.scale(loss).backward()
            if step == 2:  # else scaler.step() does it
                scaler.unscale_(optim)
                nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            scales.append(scaler.get_scale())
        return scales

    def loss_of(net, rank, step):
        loss = net(rows(rank, step)).square().mean()
        return loss * math.inf if (rank, step) == (1, 1) else loss

    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        if made_by == "the engine":
            optim = zero.optimizer(torch.optim.AdamW, lr=0.1, fused=fused)
        else:
            optim = torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)
        return train(net, optim, lambda step: [loss_of(net, comm.rank, step)]), dict(zero.state_dict())

    plain = Net()
    optim = torch.optim.AdamW(plain.parameters(), lr=0.1)
    expected = train(plain, optim, lambda step: [loss_of(plain, rank, step) / 2 for rank in range(2)])
    for scales, found in run_threads(go, 2):
        assert scales == expected == [8.0, 4.0, 8.0, 16.0]
        assert_close(found, dict(plain.state_dict()))


@pytest.mark.redundant
@pytest.mark.parametrize("stages", [(0, 2), (3, 0), (1, 3)])
def test_gradients_of_two_engines_are_clipped_together(stages):
    """Some lie whole on each rank, some in shards."""

    def clipped(nets):
        params = [param for net in nets for param in net.parameters()]
        return nn.utils.clip_grad_norm_(params, 0.05)

    def go(comm):
        nets = [Net(), Net(seed=9)]
        engines = [Zero(net, stage=stage, comm=comm) for net, stage in zip(nets, stages, strict=True)]
        for net in nets:
            net(rows(comm.rank)).square().mean().backward()
        return clipped(nets).item(), [dict(zero.full_grads()) for zero in engines]

    plain = [Net(), Net(seed=9)]
    for rank in range(2):
        for net in plain:
            (net(rows(rank)).square().mean() / 2).backward()
    expected = clipped(plain).item()
    for norm, grads in run_threads(go, 2):
        assert norm == pytest.approx(expected, rel=1e-6)
        for net, found in zip(plain, grads, strict=True):
            assert_close(found, grads_of(net))


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_a_hook_on_a_parameter_sees_the_ranks_own_gradient_as_under_ddp(stage):
    """`wandb.watch` hangs its histograms there."""

    def go(comm):
        net = Net()
        Zero(net, stage=stage, comm=comm)
        seen = {}
        for name, param in net.named_parameters():
            param.register_hook(lambda grad, name=name: seen.__setitem__(name, grad.clone()))
        net(rows(comm.rank)).square().mean().backward()
        return seen

    for rank, seen in enumerate(run_threads(go, 2)):
        plain = Net()
        plain(rows(rank)).square().mean().backward()
        assert all(type(grad) is torch.Tensor for grad in seen.values())
        assert_close({name: seen[name] for name, _ in plain.named_parameters()}, grads_of(plain))
