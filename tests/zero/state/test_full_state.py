"""Whole tensors by ordinary names: in, out, and in between."""

import pytest
import torch
from torch import nn

from nets import Net, backward, one_process, rows, train
from zeroshard import checkpoint
from zeroshard.comm import run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def at_every_stage(test):
    return pytest.mark.parametrize("stage", STAGES)(test)


def _tied(seed=0):
    net = Net(block=lambda: nn.BatchNorm1d(6), seed=seed)
    net.last.weight = net.first.weight
    net.register_buffer("scratch", torch.ones(2), persistent=False)
    net.register_buffer("steps", torch.tensor(3))
    return net


@pytest.mark.redundant
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@at_every_stage
def test_the_state_is_that_of_the_unsharded_model(stage, precision):
    states = run_threads(lambda comm: Zero(_tied(), stage=stage, comm=comm, precision=precision).state_dict(), 3)
    expected = _tied().state_dict()
    for state in states:
        assert list(state) == list(expected)
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor)
            assert state[name].dtype == tensor.dtype
        assert state["last.weight"] is state["first.weight"]
    _tied().load_state_dict(states[1])


@pytest.mark.redundant
@at_every_stage
def test_the_state_is_a_copy(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        for tensor in zero.state_dict().values():
            tensor.zero_()
        return zero.state_dict()

    assert all(torch.equal(run_threads(go, 2)[0][name], t) for name, t in Net().state_dict().items())


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("current", [False, True], ids=["after a step", "after a forward"])
@at_every_stage
def test_training_goes_on_from_what_was_loaded(stage, current, precision):
    def go(comm):
        net = Net(seed=50)
        zero = Zero(net, stage=stage, comm=comm, precision=precision)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net(rows(0)).sum().backward()
        optim.step()
        optim.zero_grad()
        if current:
            net(rows(0))
        zero.load_state_dict(Net().state_dict())
        outputs = net(rows(1)).detach()
        return zero.state_dict(), outputs

    expected = Net()
    for state, outputs in run_threads(go, 2):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.state_dict().items())
        tolerance = 1e-6 if precision is None else 0.1
        torch.testing.assert_close(outputs.float(), expected(rows(1)).detach(), rtol=0, atol=tolerance)


def test_loading_is_strict_unless_told_otherwise():
    def go(comm):
        zero = Zero(Net(), stage=3, comm=comm)
        before = zero.state_dict()
        state = Net(seed=9).state_dict()
        state["extra"] = torch.ones(1)
        del state["first.bias"]
        with pytest.raises(RuntimeError, match=r"missing key: first\.bias; unexpected key: extra"):
            zero.load_state_dict(state)
        assert all(torch.equal(tensor, before[name]) for name, tensor in zero.state_dict().items())
        keys = zero.load_state_dict(state, strict=False)
        assert (keys.missing_keys, keys.unexpected_keys) == (["first.bias"], ["extra"])
        after = zero.state_dict()
        assert torch.equal(after["first.bias"], before["first.bias"])
        assert torch.equal(after["first.weight"], state["first.weight"])
        state["last.bias"] = torch.ones(5)
        with pytest.raises(RuntimeError, match=r"size mismatch for last\.bias: \(5,\) in the state, \(6,\) in the"):
            zero.load_state_dict(state, strict=False)

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.filterwarnings("ignore:model. weights are read outside of")
@at_every_stage
def test_full_params_are_unsharded_and_current(stage, precision):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm, precision=precision)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net(rows(comm.rank)).sum().backward()
        optim.step()
        full = zero.state_dict()
        with zero.full_params(), zero.full_params():
            for name, param in net.named_parameters():
                assert torch.equal(param.detach(), full[name].to(param.dtype))
            with torch.no_grad():
                net(rows(0))
            net(rows(0)).sum().backward()
            assert all(torch.equal(p.detach(), full[n].to(p.dtype)) for n, p in net.named_parameters())
        if stage == 3:
            assert all(param.isnan().all() for param in net.parameters())

    run_threads(go, 2)


@at_every_stage
def test_what_is_written_back_is_trained_on(stage):
    def go(comm):
        net = Net(seed=7)
        zero = Zero(net, stage=stage, comm=comm)
        source = Net().state_dict()
        with zero.full_params(write_back=True), torch.no_grad():
            for name, param in net.named_parameters():
                param.copy_(source[name])
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            net(rows(comm.rank, step)).square().mean().backward()
            optim.step()
            optim.zero_grad()
        return dict(zero.state_dict())

    torch.testing.assert_close(run_threads(go, 2)[1], one_process(Net, num_steps=3), rtol=0, atol=1e-6)


@pytest.mark.redundant
@at_every_stage
def test_full_params_are_freed_after_an_error(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        at_rest = zero.memory_bytes()
        with pytest.raises(KeyError), zero.full_params():
            raise KeyError
        assert zero.memory_bytes() == at_rest
        return train(comm, Net, backward, {"stage": stage})

    run_threads(go, 2)


@pytest.mark.redundant
@at_every_stage
def test_full_grads_are_none_where_there_are_none(stage):
    def go(comm):
        net = Net(path=lambda net, x: net.blocks[1](x))
        zero = Zero(net, stage=stage, comm=comm)
        assert set(zero.full_grads().values()) == {None}
        net(rows(comm.rank)).sum().backward()
        grads = zero.full_grads()
        zero.zero_grad()
        assert set(zero.full_grads().values()) == {None}
        return grads

    grads = run_threads(go, 2)[0]
    assert list(grads) == [name for name, _ in Net().named_parameters()]
    assert {name for name, grad in grads.items() if grad is None} == {
        "blocks.0.weight",
        "blocks.0.bias",
        "blocks.2.weight",
        "blocks.2.bias",
    }
    assert all(
        grad.shape == dict(Net().named_parameters())[name].shape for name, grad in grads.items() if grad is not None
    )


@pytest.mark.redundant
@at_every_stage
def test_the_first_rank_alone_may_have_the_state(stage):
    first, second = run_threads(lambda comm: Zero(_tied(), stage=stage, comm=comm).state_dict(rank0_only=True), 2)
    assert second == {}
    assert all(torch.equal(first[name], tensor) for name, tensor in _tied().state_dict().items())


@at_every_stage
@pytest.mark.parametrize("how", ["state_dict", "checkpoint"])
def test_no_backward_goes_through_a_forward_of_weights_that_were_loaded_over(stage, how, tmp_path):
    def rank_main(comm):
        net = Net()
        zero = Zero(net, stage=stage, comm=comm)
        if how == "checkpoint":
            checkpoint.save(tmp_path / "saved", zero, step=0)
        loss = net(rows(comm.rank)).square().mean()
        if how == "checkpoint":
            checkpoint.load(tmp_path / "saved", zero)
        else:
            zero.load_state_dict(Net(seed=1).state_dict())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(rank_main, 2)
