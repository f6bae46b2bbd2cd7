"""What an engine attaches to a model and its optimizer: how much of it, that it goes, and what parts do without it."""

import collections
import copy
import gc
import warnings
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from nets import Net, assert_every_stage_equals_one_process, rows
from zeroshard.comm import NullCommunicator
from zeroshard.models.gpt2 import GPT2, GPT2Config
from zeroshard.zero import STAGES, Zero
from zeroshard.zero.core.strategy import SHARD
from zeroshard.zero.optimizers import adoption


def attached(model, optimizers=()):
    """Hooks, entries of ``vars()`` and classes that are not torch's, by kind."""
    found = collections.Counter()
    for module in model.modules():
        found["entries of modules"] += len(vars(module))
        found["hooks of modules"] += sum(len(hooks) for name, hooks in vars(module).items() if name.endswith("_hooks"))
    for param in model.parameters():
        found["entries of parameters"] += len(vars(param))
        found["hooks of parameters"] += len(param._post_accumulate_grad_hooks or ()) + len(param._backward_hooks or ())
        found["classes of parameters"] += type(param) is not nn.Parameter
    for optimizer in optimizers:
        found["entries of optimizers"] += len(vars(optimizer))
        hooks = [hooks for name, hooks in vars(optimizer).items() if name.endswith("_hooks")]
        found["hooks of optimizers"] += sum(map(len, hooks))
    return found


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [2, 3])
def test_twelve_blocks_get_three_hundred_hooks_and_entries(stage):
    """Per unit two hooks of calls, one of its state and one method; one hook per parameter, and per owner of some."""
    model = GPT2(GPT2Config(vocab_size=64, seq_len=8, n_layer=12, n_head=2, n_embd=16))
    before = attached(model, [torch.optim.AdamW(model.parameters())])
    zero = Zero(model, stage, comm=NullCommunicator(2))
    optim = zero.optimizer(torch.optim.AdamW)
    tokens = torch.zeros(1, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    optim.step()
    found = attached(model, [optim])
    found.subtract(before)
    assert found.pop("classes of parameters") == 148  # while weights are stale or sharded; a forward at stage 2 ends it
    assert found == {
        "entries of modules": 20,
        "hooks of modules": 120,
        "entries of parameters": 0,
        "hooks of parameters": 148,
        "entries of optimizers": 8,
        "hooks of optimizers": 3,
    }
    zero.remove()
    left = attached(model)
    left.subtract(before)
    assert not any(left[kind] for kind in left if "optimizers" not in kind)


def test_torchs_hook_around_all_steps_goes_with_the_last_engine_that_is_removed(monkeypatch):
    # Engines of other tests may be freed in the midst of this one: here only its own count.
    monkeypatch.setattr(adoption, "_engines", weakref.WeakSet())
    monkeypatch.setattr(adoption, "_replaced", WeakTensorKeyDictionary())
    monkeypatch.setattr(adoption, "_hook", None)
    others = len(_global_optimizer_pre_hooks)
    zeros = [Zero(Net(), 2, comm=NullCommunicator(2)) for _ in range(3)]
    here = len(_global_optimizer_pre_hooks)
    assert here == others + 1
    zeros.pop()
    gc.collect()
    zeros.pop().remove()
    assert len(_global_optimizer_pre_hooks) == here
    zeros.pop().remove()
    assert len(_global_optimizer_pre_hooks) == others
    net = Net()
    zero = Zero(net, 2, comm=NullCommunicator(2))
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    net(rows(0)).sum().backward()
    optim.step()
    assert "zero_grad" in vars(optim)  # a new engine takes optimizers over, too
    zero.remove()
    assert len(_global_optimizer_pre_hooks) == others


# -- modules inside of a unit, which have no methods of ours ------------------------------------------------------


def pair():
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())


START = nn.Linear(6, 6).state_dict()


def write_by_methods(turn):
    sharded = turn.zero is not None and turn.zero.strategy.params is SHARD
    if turn.step == 1:
        inner = turn.model.blocks[1][0]
        with turn.zero.full_params(write_back=True) if sharded else nullcontext():
            inner.load_state_dict({name: value / 2 for name, value in START.items()})
            inner.to("cpu", torch.float32)
            inner.apply(lambda module: nn.init.constant_(module.bias, 0.5))
    turn.loss().backward()


@pytest.mark.redundant
def test_a_part_of_a_unit_takes_what_its_own_methods_write():
    assert_every_stage_equals_one_process(partial(Net, block=pair), write_by_methods)


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_of_a_unit_is_never_moved_to_another_dtype_in_silence(stage):
    net = Net(block=pair)
    optim = Zero(net, stage, comm=NullCommunicator(2)).optimizer(torch.optim.SGD, lr=0.1)
    net(rows(0)).sum().backward()

    def train_on():
        net.blocks[1][0].half()
        optim.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            RuntimeError, match=r"^blocks\.1\.0\.weight: its \.data (is torch\.float16 on|was assigned)"
        ):
            train_on()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("stepped", [False, True])
def test_a_part_of_a_unit_is_not_copied_either(stage, stepped):
    net = Net(block=pair)
    optim = Zero(net, stage, comm=NullCommunicator(2)).optimizer(torch.optim.SGD, lr=0.1)
    if stepped:
        net(rows(0)).sum().backward()
        optim.step()
    with pytest.raises(RuntimeError, match=r"^copy\.deepcopy\(model\): the copy would drive this model's engine"):
        copy.deepcopy(net.blocks[1][0])


def test_a_part_of_a_unit_with_sharded_weights_takes_no_state_and_warns_before_it_gives_one():
    net = Net(block=pair)
    Zero(net, 3, comm=NullCommunicator(2))
    inner = net.blocks[1][0]
    with pytest.warns(UserWarning, match="they are sharded and show NaN"):
        state = inner.state_dict()
    assert state["weight"].isnan().all()
    with pytest.raises(RuntimeError, match=r"zero\.full_params\(write_back=True\)"):
        inner.load_state_dict(nn.Linear(6, 6).state_dict())
