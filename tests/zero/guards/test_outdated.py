"""Weights read between a step and the next forward: right at stages 0 to 2, a warning where they are sharded."""

import copy
import io
import pickle
import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from nets import Net, rows
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

PRECISIONS = {"fp32": None, "bf16": MixedPrecision(param_dtype=torch.bfloat16)}
WHOLE = [0, 1, 2]


def trained(stage, comm, precision=None):
    """A model right after a step, its engine, its optimizer."""
    net = Net()
    zero = Zero(net, stage, comm=comm, precision=precision)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    step(net, optim, comm.rank)
    return net, zero, optim


def step(net, optim, rank=0):
    net(rows(rank)).float().square().sum().backward()
    optim.step()
    optim.zero_grad()


def unpickled(weight):
    return torch.load(io.BytesIO(saved(weight)))


def saved(weight):
    file = io.BytesIO()
    torch.save(weight, file)
    return file.getvalue()


READS = {
    "attribute": lambda net: net.last.weight + 0,
    "data": lambda net: net.last.weight.data,
    "detach": lambda net: net.last.weight.detach(),
    "a part's parameters": lambda net: next(iter(net.last.parameters())).clone(),
    "a wrapper's parameters": lambda net: dict(nn.Sequential(net).named_parameters())["0.last.weight"].clone(),
    "in a list": lambda net: torch.stack([net.last.weight, net.last.weight])[1],
    "foreach": lambda net: torch._foreach_mul([net.last.weight], 1.0)[0],
    "by keyword": lambda net: torch.add(torch.zeros(()), other=net.last.weight),
    "deepcopy": lambda net: copy.deepcopy(net.last.weight),
    "pickle": lambda net: unpickled(net.last.weight),
    "to": lambda net: net.last.weight.to(torch.float64).to(net.last.weight.dtype),
    "items": lambda net: torch.tensor(net.last.weight.tolist()).to(net.last.weight.dtype),
    "copied into another": lambda net: torch.zeros_like(net.last.weight).copy_(net.last.weight),
    "matmul": lambda net: net.last.weight @ torch.eye(net.last.weight.shape[1], dtype=net.last.weight.dtype),
}


@pytest.mark.redundant
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", WHOLE)
def test_weights_that_are_read_after_a_step_are_those_of_the_step(stage, precision):
    def go(comm):
        net, zero, optim = trained(stage, comm, PRECISIONS[precision])
        for name, read in READS.items():
            found = read(net).detach().clone()
            with zero.full_params():
                assert torch.equal(found, net.last.weight), name
            assert type(net.last.weight) is nn.Parameter
            step(net, optim, comm.rank)

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_may_read_alone_and_waits_for_the_others_next_forward(stage):
    def go(comm):
        net, zero, optim = trained(stage, comm)
        step(net, optim, comm.rank)
        norm = net.last.weight.norm().item() if comm.rank == 0 else None
        step(net, optim, comm.rank)
        return norm, zero.state_dict()

    def together(comm):
        net, zero, optim = trained(stage, comm)
        step(net, optim, comm.rank)
        with zero.full_params():
            norm = net.last.weight.norm().item()
        step(net, optim, comm.rank)
        return norm, zero.state_dict()

    (norm, state), (_, other) = run_threads(go, 2)
    right, weights = run_threads(together, 2)[0]
    assert norm == right
    assert all(torch.equal(state[name], weights[name]) and torch.equal(other[name], weights[name]) for name in weights)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_asks_for_no_values_gathers_nothing(stage):
    net, zero, _ = trained(stage, NullCommunicator(2))
    for param in net.parameters():
        assert param.grad is None
        assert param.requires_grad
        assert param.is_leaf
        assert (param.shape, param.numel(), param.dim(), param.dtype, param.device) is not None
        assert isinstance(param, nn.Parameter)
        assert type(param).__name__ == "Parameter"
        assert param in {param}
    net.zero_grad()
    net.requires_grad_(True)
    sum(param.numel() for param in nn.Sequential(net).parameters())
    assert not zero._runtime.weights.readable


def clamp_data(net):
    for param in net.parameters():
        param.data.clamp_(-0.1, 0.1)


def clamp(net):
    with torch.no_grad():
        for param in net.parameters():
            param.clamp_(-0.1, 0.1)


def assign(net):
    for param in net.parameters():
        param.data = param.data.clamp(-0.1, 0.1)


def by_vector(net):
    clipped = nn.utils.parameters_to_vector(net.parameters()).detach().clamp(-0.1, 0.1)
    nn.utils.vector_to_parameters(clipped, net.parameters())


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.filterwarnings("ignore:model. weights are read outside of")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("when", ["before the step", "after the step", "after the step, in full_params"])
@pytest.mark.parametrize("write", [clamp_data, clamp, assign, by_vector])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_that_are_written_in_each_step_are_those_of_one_process_or_refused(stage, write, when, precision):
    """A critic's loop as it stands in the paper's code, among others; sharded weights inside full_params() alone."""
    inside = when.endswith("full_params")

    def train(net, optim, backward, around=nullcontext):
        for _ in range(3):
            backward()
            if when == "before the step":
                write(net)
            optim.step()
            optim.zero_grad()
            if when != "before the step":
                with around():
                    write(net)
        return net

    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, precision=PRECISIONS[precision])
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        around = partial(zero.full_params, write_back=True) if inside else nullcontext
        train(net, optim, lambda: net(rows(comm.rank)).float().square().sum().backward(), around)
        net(rows(comm.rank))
        return zero.state_dict()

    if stage == 3 and not inside:
        said = r"first\.weight: its \.data was assigned" if write in (assign, by_vector) else "it was written"
        with pytest.raises(RuntimeError, match=rf"{said} to .*full_params\(write_back=True\)"):
            run_threads(go, 2)
        return
    plain = Net()
    optim = torch.optim.SGD(plain.parameters(), lr=0.1)
    train(plain, optim, lambda: (sum(plain(rows(rank)).square().sum() for rank in range(2)) / 2).backward())
    for state in run_threads(go, 2):
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-5 if precision == "fp32" else 0.05)


def test_another_shape_assigned_to_data_is_refused():
    net, _, optim = trained(2, NullCommunicator(2))
    net(rows(0)).sum().backward()
    net.last.bias.data = torch.zeros(3)
    with pytest.raises(
        RuntimeError,
        match=r"^last\.bias: its \.data is a tensor of shape \(3,\) now; .*\(6,\): resize it before Zero\(\)$",
    ):
        optim.step()


@pytest.mark.redundant(but=["in a list"])
@pytest.mark.parametrize("read", ["attribute", "deepcopy", "pickle", "in a list"])
def test_sharded_weights_read_as_nan_and_a_warning_says_so_once(read):
    net, zero, optim = trained(3, NullCommunicator(2))
    with pytest.warns(UserWarning, match=r"^model: weights are read outside of .*zero.full_params\(\)") as told:
        assert READS[read](net).isnan().all()
    assert len(told) == 1
    assert told[0].filename == __file__ or read != "attribute"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in READS.values():
            step(net, optim)
            assert each(net).isnan().all()
            with zero.full_params():
                each(net)


def _after_full_params(net, zero):
    with zero.full_params():
        pass


BEFORE = {
    "nothing": lambda net, zero: None,
    "a forward": lambda net, zero: net(rows(0)),
    "an evaluation": lambda net, zero: torch.no_grad()(net)(rows(0)),
    "a backward": lambda net, zero: net(rows(0)).sum().backward(),
    "full_params": _after_full_params,
}


@pytest.mark.parametrize("before", BEFORE)
def test_whoever_reads_sharded_weights_outside_of_forward_and_backward_is_told(before):
    net = Net()
    zero = Zero(net, 3, comm=NullCommunicator(2))
    kept = BEFORE[before](net, zero)  # what a forward has computed lives on
    with pytest.warns(UserWarning, match=r"^model: weights are read outside of .*zero.full_params\(\)") as told:
        assert net.blocks[0].weight.sum().isnan()
    assert len(told) == 1
    assert told[0].filename == __file__, told[0].filename
    del kept


def _held(net):
    """Tensors in the memory of weights, as users keep them: a view, a detached one, a graph over either."""
    view = net.last.weight.view(-1)
    return view, net.blocks[0].weight.detach(), (view * view).sum()


@pytest.mark.redundant
@pytest.mark.parametrize("gathering", [MixedPrecision(), MixedPrecision(gather="int8")], ids=["whole", "int8"])
def test_views_from_full_params_keep_their_values_and_their_memory(gathering):
    def go(comm):
        net = Net()
        zero = Zero(net, 3, comm=comm, precision=gathering)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        params = [group.params for group in zero._runtime.groups()]
        with zero.full_params():
            kept = _held(net)[:2]
            expected = [tensor.detach().clone() for tensor in kept]
        assert not any(each.full_bytes for each in params)
        memory = {each.full.untyped_storage()._cdata for each in params}
        assert not any(tensor.untyped_storage()._cdata in memory for tensor in kept)
        step(net, optim, comm.rank)
        net(rows(comm.rank))
        torch.testing.assert_close([tensor.detach() for tensor in kept], expected, rtol=0, atol=0)
        with zero.full_params():
            assert not torch.equal(net.last.weight.view(-1), expected[0])

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("write_back", [False, True])
def test_a_penalty_on_a_view_may_be_backpropagated_outside_of_full_params(stage, write_back):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm)
        with zero.full_params(write_back=write_back):
            *_, penalty = _held(net)
        (net(rows(comm.rank)).square().mean() + penalty).backward()
        return zero.full_grads()

    plain = Net()
    for rank in range(2):
        ((plain(rows(rank)).square().mean() + plain.last.weight.view(-1).square().sum()) / 2).backward()
    for found in run_threads(go, 2):
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.grad)


def test_a_view_of_averages_shows_them():
    def go(comm):
        net = Net()
        zero = Zero(net, 3, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        ema = zero.ema(0.5)
        step(net, optim, comm.rank)
        for blocks in ((ema.weights(), zero.full_params()), (zero.full_params(), ema.weights())):
            with blocks[0], blocks[1]:
                view = net.last.weight.view(-1)
                averages = view.detach().clone()
            net(rows(comm.rank))
            assert torch.equal(view, averages)

    run_threads(go, 2)


def test_nobody_is_told_inside_of_a_forward_or_after_the_engine_is_gone():
    for stage in (1, 2, 3):
        net, zero, optim = trained(stage, NullCommunicator(2))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(net, optim)
            assert torch.zeros_like(net.last.weight).isfinite().all()
            with zero.full_params():
                assert type(net.last.weight) is nn.Parameter
            step(net, optim)
            zero.remove()
        assert type(net.last.weight) is nn.Parameter
        assert net.last.weight.isfinite().all()


class Scaled(nn.Parameter):
    """A parameter of a class of its own."""


class Heard(nn.Parameter):
    """One that hears of its own reads."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Scaled, Heard])
def test_parameters_of_other_classes_keep_them(kind):
    net = Net()
    net.last.weight = kind(net.last.weight.data)
    zero = Zero(net, 2, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    step(net, optim)
    assert isinstance(net.last.weight, kind)
    net.last.weight.norm()
    assert type(net.last.weight) is kind
    step(net, optim)
    net(rows(0))
    assert type(net.last.weight) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind
