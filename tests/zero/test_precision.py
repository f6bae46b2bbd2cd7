import pytest
import torch

from nets import Net, one_process, rows, train
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero


def test_compute_and_reduction_have_a_dtype_each():
    policy = MixedPrecision(param_dtype=torch.bfloat16)
    assert policy.compute_dtype(torch.float32) == torch.bfloat16
    assert policy.gradient_dtype(torch.float32) == torch.float32
    assert policy.compute_dtype(torch.int64) == torch.int64
    assert MixedPrecision(reduce_dtype=torch.bfloat16).gradient_dtype(torch.float32) == torch.bfloat16
    assert MixedPrecision(torch.bfloat16, torch.float32).gradient_dtype(torch.complex64) == torch.complex64


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
