"""The fixed meanings of the public API, at every stage."""

import copy
import gc
import subprocess
import sys
import weakref
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from nets import Net, assert_every_stage_equals_one_process, linear, rows
from zeroshard.comm import LocalCommunicator, NullCommunicator, run_threads
from zeroshard.models import build_model
from zeroshard.zero import STAGES, Zero

MODELS = {
    "gpt2-demo": {"n_layer": 2, "n_head": 3, "n_embd": 9},
    "llama-tiny": {"n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 12},
}


def at_every_stage(test):
    return pytest.mark.parametrize("stage", STAGES)(test)


@at_every_stage
def test_training_starts_from_rank_zeros_parameters_and_buffers(stage):
    def go(comm):
        net = Net(block=lambda: nn.BatchNorm1d(6), seed=comm.rank)
        net.register_buffer("transposed", torch.full((2, 3), float(comm.rank)).t())
        net.register_buffer("flag", torch.tensor(comm.rank == 0))
        for block in net.blocks:
            block.running_mean.fill_(comm.rank + 1)
            block.num_batches_tracked.fill_(comm.rank + 5)
        zero = Zero(net, stage=stage, comm=comm)
        return zero.state_dict()

    states = run_threads(go, 3)
    expected = Net(block=lambda: nn.BatchNorm1d(6), seed=0).state_dict()
    for state in states:
        assert all(torch.equal(state[name], states[0][name]) for name in states[0])
        assert all(torch.equal(state[name], expected[name]) for name in ("first.weight", "blocks.1.weight"))
        assert state["blocks.0.running_mean"].eq(1).all()
        assert state["blocks.0.num_batches_tracked"] == 5
        assert state["transposed"].eq(0).all()
        assert state["flag"]


@pytest.mark.redundant
def test_dtypes_may_be_mixed_in_a_unit():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow, self.wide = linear(), linear().double()

        def forward(self, x):
            return self.wide(self.narrow(x).double()).float()

    assert_every_stage_equals_one_process(lambda: Net(block=Mixed), world_size=3)


@pytest.mark.redundant
def test_a_model_may_be_one_parameter_and_no_unit():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(2.0))

        def forward(self, x):
            return x * self.w

    assert_every_stage_equals_one_process(One, world_size=4)


def test_a_model_may_have_no_root_parameters_or_no_trained_ones():
    for stage in STAGES:
        model = nn.Sequential(nn.ModuleList([linear()])[0])
        Zero(model, stage=stage, units=[model[0]], comm=NullCommunicator(2))
        model(rows(0)).sum().backward()
        frozen = Net().requires_grad_(False)
        zero = Zero(frozen, stage=stage, comm=NullCommunicator(2))
        frozen(rows(0))
        assert zero.clip_grad_norm_(1.0) == 0.0


@pytest.mark.redundant
@pytest.mark.parametrize("name", MODELS)
@at_every_stage
def test_a_model_on_the_meta_device_starts_from_the_same_bits(stage, name):
    def go(comm):
        with torch.device("meta"):
            model = build_model(name, vocab_size=31, seq_len=8, overrides=MODELS[name])
        return Zero(model, stage=stage, comm=comm, init=model.init_parameter).state_dict()

    eager = build_model(name, vocab_size=31, seq_len=8, overrides=MODELS[name]).state_dict()
    for state in run_threads(go, 3):
        assert list(state) == list(eager)
        assert all(torch.equal(state[key], eager[key]) for key in eager)


def test_a_model_on_the_meta_device_needs_init():
    with torch.device("meta"):
        model = build_model("gpt2-demo", vocab_size=31, seq_len=8, overrides=MODELS["gpt2-demo"])
    with pytest.raises(ValueError, match="init: the model has parameters on the meta device"):
        Zero(model, comm=LocalCommunicator())


@pytest.mark.redundant
@pytest.mark.parametrize("adopted", [False, True])
def test_nothing_stays_behind_after_del(adopted):
    left = []
    for comm in (LocalCommunicator(), NullCommunicator(2)):
        for stage in STAGES:
            net = Net()
            zero = Zero(net, stage=stage, comm=comm)
            optim = torch.optim.AdamW(net.parameters()) if adopted else zero.optimizer(torch.optim.AdamW, lr=0.1)
            for _ in range(2):
                net(rows(0)).sum().backward()
                optim.step()
            gone = net, zero, optim, net.first.weight, net.blocks[0].bias, *zero.units
            left += [weakref.ref(thing) for thing in gone]
            del net, zero, optim, gone
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)


def test_the_engine_lives_as_long_as_its_model():
    net = Net()
    optim = Zero(net, comm=NullCommunicator(2)).optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        gc.collect()
        net(rows(0)).sum().backward()
        assert all(shard.grad is not None for shard in optim.param_groups[0]["params"])
        optim.step()
        optim.zero_grad()


@pytest.mark.redundant
@at_every_stage
def test_remove_gives_the_plain_module_back(stage):
    def go(comm):
        net = Net()
        before = list(net.parameters())
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        net(rows(comm.rank)).sum().backward()
        optim.step()
        whole = zero.state_dict()
        zero.remove()
        assert all(ours is param for ours, param in zip(net.parameters(), before, strict=True))
        assert all(torch.equal(whole[name], tensor) for name, tensor in net.state_dict().items())
        assert not net._forward_pre_hooks
        assert not net._forward_hooks
        assert not net._state_dict_pre_hooks
        net.load_state_dict(whole)
        net.zero_grad(set_to_none=False)
        net(rows(0)).sum().backward()
        assert all(param.grad is not None for param in net.parameters())
        assert len({param.untyped_storage().data_ptr() for param in net.parameters()}) == len(before)
        Zero(net, stage=stage, comm=comm)

    run_threads(go, 2)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_state_dict_of_the_module_or_of_a_part_is_refused_while_it_would_be_wrong(stage):
    net = Net()
    zero = Zero(net, stage=stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    net(rows(0)).sum().backward()
    optim.step()
    parts = [(net, Net()), *([(net.last, Net().last)] if stage == 3 else [])]
    for module, plain in parts:
        with pytest.raises(RuntimeError, match=r"zero\.state_dict"):
            module.state_dict()
        todo = r"zero\.load_state_dict" if module is net else r"zero\.full_params\(write_back=True\)"
        with pytest.raises(RuntimeError, match=todo):
            module.load_state_dict(plain.state_dict())
    with zero.full_params():
        assert all(list(module.state_dict()) == list(plain.state_dict()) for module, plain in parts)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_rows_that_a_rank_rescales_as_it_looks_them_up_are_refused(kind):
    model = nn.Sequential(kind(10, 6, max_norm=0.5))
    with pytest.raises(ValueError, match=r"^0: with max_norm=0.5 forward rescales the rows that it looks up"):
        Zero(model, stage=1, comm=NullCommunicator(2))
    Zero(model, stage=1, comm=LocalCommunicator())


def test_a_model_that_is_none_or_has_an_engine_and_a_unit_that_is_never_called_are_refused():
    with pytest.raises(TypeError, match=r"model: list is not an nn\.Module"):
        Zero([linear()], comm=LocalCommunicator())
    net = Net()
    with pytest.raises(ValueError, match="units: 'blocks' is a container"):
        Zero(net, units=[net.blocks], comm=LocalCommunicator())
    net = Net()
    Zero(net, comm=LocalCommunicator())
    with pytest.raises(ValueError, match="has an engine already"):
        Zero(net, comm=LocalCommunicator())


@pytest.mark.redundant
@pytest.mark.parametrize("accumulate", ["local", "sharded", None])
@at_every_stage
def test_micro_batches_add_up_where_the_engine_is_told_to(stage, accumulate):
    net = Net()
    zero = Zero(net, stage=stage, comm=NullCommunicator(2), accumulate=accumulate)
    with zero.micro_batch(last=False):
        net(rows(0)).sum().backward()
    sharded = accumulate == "sharded" or (accumulate is None and stage >= 2)
    assert all((group.grads.reduced is not None) == sharded for unit in zero.units for group in unit.groups)


def encode_before_and_after(turn):
    x = turn.model.first(rows(turn.rank, turn.step))
    with torch.no_grad():
        x += turn.model.last(turn.model(x))
    (turn.model(x) + turn.model.last(x)).square().mean().backward()


@pytest.mark.redundant
def test_other_methods_of_the_model_may_call_its_parts():
    assert_every_stage_equals_one_process(Net, encode_before_and_after)


def test_a_copy_would_drive_the_same_engine_and_is_refused():
    model = Net()
    zero = Zero(model, 3, comm=NullCommunicator(2))
    for part in (model, model.blocks[0]):
        with pytest.raises(RuntimeError, match=r"^copy\.deepcopy\(model\): .*before Zero\(\).*zero\.ema\(\)"):
            copy.deepcopy(part)
    zero.remove()
    assert torch.equal(copy.deepcopy(model)(rows(0)), model(rows(0)))
    assert "_ddp_params_and_buffers_to_ignore" not in vars(model)
    assert model.apply(lambda module: None).double().first.weight.dtype == torch.float64


def test_its_repr_says_what_it_is():
    said = run_threads(lambda comm: repr(Zero(nn.Sequential(linear(), linear()), 2, units="auto", comm=comm)), 2)
    size = 2 * sum(param.numel() for param in linear().parameters())
    assert said == [f"Zero(stage 2, rank {rank} of 2, 2 units, {size:,} parameters)" for rank in range(2)]


@pytest.mark.redundant
@pytest.mark.skipif(find_spec("ty") is None, reason="ty, which reads types, is not installed")
def test_an_optimizer_has_the_type_of_its_class(tmp_path):
    program = tmp_path / "program.py"
    program.write_text("""
from typing import assert_type
import torch
from zeroshard import Zero
zero = Zero(torch.nn.Linear(1, 1))
assert_type(zero.optimizer(torch.optim.AdamW, lr=1.0), torch.optim.AdamW)
""")
    words = [sys.executable, "-m", "ty", "check", "--python", sys.prefix, str(program)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
