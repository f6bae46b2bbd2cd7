from functools import partial

import pytest
import torch
from torch import nn

from nets import Net, TiedHead, linear, one_process, rows, train
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

BF16 = torch.bfloat16


def test_compute_and_reduction_have_a_dtype_each():
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    assert policy.compute_dtype(torch.float32) == torch.bfloat16
    assert policy.gradient_dtype(torch.float32) == torch.float32
    assert policy.compute_dtype(torch.int64) == torch.int64
    assert MixedPrecision(reduce_dtype=torch.bfloat16).gradient_dtype(torch.float32) == torch.bfloat16
    assert MixedPrecision(torch.bfloat16, torch.float32).gradient_dtype(torch.complex64) == torch.complex64


@pytest.mark.redundant(but=["3-reduce_dtype1"])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_bf16_has_the_same_bits_at_every_stage(world_size, reduce_dtype):
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    states = []
    for stage in STAGES:
        kwargs = {"stage": stage, "precision": policy}
        states += run_threads(lambda comm, k=kwargs: train(comm, Net, lambda t: t.loss().backward(), k), world_size)
    for state in states:
        assert {tensor.dtype for tensor in state.values()} == {torch.float32}
        assert all(torch.equal(state[name], states[0][name]) for name in state)
    exact = one_process(Net, world_size=world_size)
    for name, full in exact.items():
        torch.testing.assert_close(states[0][name], full, rtol=0, atol=0.05)
        assert not torch.equal(states[0][name], full)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", STAGES)
def test_bf16_computes_in_bf16_and_keeps_fp32_masters(stage):
    net = Net()
    seen = []
    net.blocks[0].register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    zero = Zero(net, stage=stage, comm=NullCommunicator(2), precision=MixedPrecision(param_dtype=torch.bfloat16))
    optim = zero.optimizer(torch.optim.SGD, lr=1e-4)  # steps too small for bf16
    start = zero.state_dict()["blocks.0.weight"]
    assert torch.equal(start, Net().state_dict()["blocks.0.weight"]) or stage > 0  # a null world repeats its shard
    assert net(rows(0)).dtype == torch.bfloat16
    assert seen == [(torch.bfloat16, torch.bfloat16)]
    net(rows(0)).sum().backward()
    optim.step()
    assert not torch.equal(zero.state_dict()["blocks.0.weight"], start)
    zero.remove()
    assert {param.dtype for param in net.parameters()} == {torch.float32}


def test_inputs_are_left_alone_where_the_policy_says_so():
    net = Net().bfloat16()
    Zero(net, comm=NullCommunicator(2), precision=MixedPrecision(torch.bfloat16, cast_forward_inputs=False))
    with pytest.raises(RuntimeError, match="dtype"):
        net(rows(0))


def test_a_model_may_write_into_what_it_is_given():
    class Tells(Net):
        def forward(self, x, heard):
            heard.append(x.dtype)
            return super().forward(x)

    model = Tells()
    Zero(model, 2, precision=MixedPrecision(param_dtype=torch.bfloat16), comm=NullCommunicator(2))
    heard: list[torch.dtype] = []
    model(rows(0), heard)
    assert heard == [torch.bfloat16]


class Router(nn.Module):
    """A module in which products and a softmax are exact, so that experts are chosen alike."""

    def __init__(self):
        super().__init__()
        self.gate = linear()

    def forward(self, x):
        return self.gate(x).softmax(-1)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.up, self.wo = Router(), linear(), linear()

    def forward(self, x):
        return self.router(self.wo(torch.tanh(self.up(x))))  # no sum, whose order would be seen in 16 bits


def by_hand(module, kept):
    """One process that computes as ``module``: weights are cast where they are used, but for those of ``kept``."""
    inside = {part for each in kept for part in each.modules()} - kept
    for part in module.modules():
        if part in kept or (isinstance(part, nn.Linear) and part not in inside):
            exact, forward = part in kept, part.forward

            def cast(x, part=part, exact=exact, forward=forward):
                dtype = torch.float32 if exact else BF16
                weights = {name: param.to(dtype) for name, param in part.named_parameters()}
                part.forward = forward
                y = torch.func.functional_call(part, weights, (x.to(dtype),))
                part.forward = partial(cast, part=part, exact=exact, forward=forward)
                return y if dtype == x.dtype else y.to(x.dtype)

            part.forward = cast
    return module


@pytest.mark.parametrize("stage", STAGES)
def test_modules_that_are_kept_compute_in_fp32_and_the_others_as_without_them(stage):
    policy = MixedPrecision(BF16, keep_in_fp32_modules=(Router, "wo"))
    build = lambda: Net(2, Expert)  # noqa: E731
    seen = {}

    def watched():
        net = build()
        for name, part in net.blocks[0].named_modules():
            part.register_forward_hook(lambda part, args, y, name=name: seen.update({name: (args[0].dtype, y.dtype)}))
        return net

    def plain():
        net = build()
        return by_hand(net, {part for block in net.blocks for part in (block.router, block.wo)})

    def turn(turn):
        turn.model(rows(turn.rank, turn.step).to(BF16)).square().mean().backward()

    kwargs = {"stage": stage, "precision": policy}
    expected = one_process(plain, turn, optimizer=torch.optim.SGD, lr=0.5)
    for found in run_threads(lambda comm: train(comm, watched, turn, kwargs, optimizer=torch.optim.SGD, lr=0.5), 2):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    exact, narrow = (torch.float32, torch.float32), (BF16, BF16)
    assert seen["router.gate"] == exact
    assert seen["up"] == seen[""] == narrow


@pytest.mark.parametrize(
    ("build", "kept", "what"),
    [
        (Net, "lst", r"no module of the model is a 'lst' or called so; did you mean last\?"),
        (Net, [nn.Conv2d], r"no module of the model is a 'Conv2d' or called so; "),
        (TiedHead, "embed", r"(embed|head).weight is tied to a parameter of another module; keep both"),
        (lambda: Net().bfloat16(), "last", r"last.weight is torch.bfloat16; make the model in torch.float32"),
        (Net, 3, r"3 is no class of modules and no name; "),
        (Net, [nn.Linear(1, 1)], r"Linear\(.*\) is no class of modules and no name; "),
    ],
)
def test_what_cannot_be_kept_in_fp32_is_refused_in_a_line(build, kept, what):
    with pytest.raises(ValueError, match=f"^keep_in_fp32_modules: {what}"):
        Zero(build(), 2, comm=NullCommunicator(2), precision=MixedPrecision(BF16, keep_in_fp32_modules=kept))


def test_tied_modules_are_kept_together_and_casts_leave_with_the_engine():
    model = TiedHead()
    policy = MixedPrecision(BF16, keep_in_fp32_modules=["embed", "head"])
    zero = Zero(model, 3, comm=NullCommunicator(2), precision=policy)
    x = model.layers[0](model.embed(torch.tensor([[1, 2]])))
    assert (x.dtype, model.head(x).dtype, model.head.weight.dtype) == (BF16, BF16, torch.float32)
    zero.remove()
    assert model.head(model.embed(torch.tensor([1]))).dtype == torch.float32
