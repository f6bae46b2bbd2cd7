"""Muon for the blocks' matrices and AdamW for the rest, as one optimizer."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from exactness import same_bits
from zeroshard import Zero
from zeroshard.comm import run_threads
from zeroshard.models import gpt2
from zeroshard.optim import MuonAdamW, muon, muon_groups

SETTINGS = {"lr": 0.01, "betas": (0.8, 0.9), "momentum": 0.9}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 12, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 12)) for _ in range(2))
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _net():
    torch.manual_seed(0)
    return Net()


def _groups(net, weight_decay=0.1):
    return muon_groups(net.named_parameters(), weight_decay, ["blocks.0", "blocks.1"])


def _rows(step):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def _train(net, optims, num_steps=3, state_dict=None):
    for step in range(num_steps):
        net(_rows(step)).square().mean().backward()
        for optim in optims:
            optim.step()
            optim.zero_grad()
    return dict((state_dict or net.state_dict)())


def test_the_blocks_matrices_are_muon_s():
    groups = _groups(_net())
    assert [(group["matrices"], group["weight_decay"], len(group["params"])) for group in groups] == [
        (True, 0.1, 4),
        (False, 0.1, 2),
        (False, 0.0, 5),
    ]


@pytest.mark.parametrize("products", ["bfloat16", "fp32"])
@pytest.mark.parametrize("fused", [False, True])
def test_it_steps_as_torch_s_two_do_side_by_side(fused, products, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device: products == "bfloat16")
    if products == "fp32":
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's own iteration, in fp32
    net, other = _net(), _net()
    together = _train(net, [MuonAdamW(_groups(net), fused=fused, **SETTINGS)])
    matrices, *others = [{**g, "params": list(g["params"])} for g in _groups(other)]
    apart = [
        torch.optim.Muon(matrices["params"], 0.01, 0.1, 0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, 0.01, (0.8, 0.9), fused=fused),
    ]
    assert same_bits(together, _train(other, apart))


def test_in_fp32_the_options_of_a_group_are_torch_s(monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device: False)
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    options = {"adjust_lr_fn": "original", "nesterov": False, "ns_steps": 3, "weight_decay": 0.3}
    net, other = _net(), _net()
    (ours, *_), (theirs, *_) = _groups(net), _groups(other)
    trained = _train(net, [MuonAdamW([ours | options], **SETTINGS)])
    assert same_bits(trained, _train(other, [torch.optim.Muon(theirs["params"], 0.01, momentum=0.9, **options)]))


class Products(TorchDispatchMode):
    """How often each operation was called."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("numel", "deterministic", "batches"), [(2**26, False, 4), (16 * 48, False, 40), (2**26, True, 48)]
)
def test_matrices_of_one_shape_are_one_product_up_to_a_bound_and_have_the_bits_of_one_by_one(
    numel, deterministic, batches, monkeypatch
):
    monkeypatch.setattr(muon, "BATCH_NUMEL", numel)
    model = gpt2.GPT2(gpt2.GPT2Config(vocab_size=32, seq_len=8, n_layer=12, n_head=2, n_embd=16))
    groups = muon_groups(model.named_parameters(), 0.1, [f"blocks.{i}" for i in range(12)])
    matrices = groups[0]["params"]
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(param.shape, generator=generator) for param in matrices]
    apart = [nn.Parameter(param.detach().clone()) for param in matrices]
    for params in (matrices, apart):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
    optim = MuonAdamW(groups, **SETTINGS)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    with Products() as products:
        optim.step()
    assert {name: count for name, count in products.count.items() if name.endswith("mm")} == {
        "bmm": 5 * batches,
        "baddbmm": 10 * batches,
    }
    for param in apart:
        MuonAdamW([{"params": [param], "weight_decay": 0.1, "matrices": True}], **SETTINGS).step()
    assert all(map(torch.equal, matrices, apart))


def test_a_saved_state_goes_on_where_it_stopped():
    net = _net()
    optim = MuonAdamW(_groups(net), **SETTINGS)
    _train(net, [optim], 2)
    other = copy.deepcopy(net)
    again = MuonAdamW(_groups(other), **SETTINGS)
    again.load_state_dict(copy.deepcopy(optim.state_dict()))
    assert same_bits(_train(net, [optim]), _train(other, [again]))


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sharded_it_has_the_bits_of_one_process(stage):
    untrained = _net()  # threads share a random generator: no rank may draw weights of its own
    net = copy.deepcopy(untrained)
    expected = _train(net, [MuonAdamW(_groups(net), **SETTINGS)])

    def rank_main(comm):
        net = copy.deepcopy(untrained)
        zero = Zero(net, stage=stage, comm=comm)
        optim = zero.optimizer(MuonAdamW, _groups(net), **SETTINGS)
        return _train(net, [optim], state_dict=zero.state_dict)

    for state in run_threads(rank_main, 2):  # each rank sees the same rows: the mean is exact
        assert same_bits(state, expected)


def test_what_is_no_matrix_is_refused():
    with pytest.raises(ValueError, match=r"params: Muon updates matrices, and one has the shape \(3,\)"):
        MuonAdamW([{"params": [nn.Parameter(torch.ones(3))], "matrices": True}])


@pytest.mark.parametrize("products", ["bfloat16", "fp32"])
def test_complex_matrices_are_refused_whatever_the_products(products, monkeypatch):
    monkeypatch.setattr(muon, "multiplies_bfloat16", lambda device: products == "bfloat16")
    matrix = nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))
    matrix.grad = torch.ones_like(matrix)
    with pytest.raises(RuntimeError, match="complex parameters"):
        MuonAdamW([{"params": [matrix], "matrices": True}]).step()
