import pytest
import torch
from torch import nn

from zeroshard.optim import decay_groups


@pytest.fixture
def model() -> nn.Module:
    model = nn.Module()
    model.embed = nn.Embedding(7, 4)
    model.norm = nn.LayerNorm(4)
    model.frozen = nn.Linear(4, 4).requires_grad_(False)
    model.head = nn.Linear(4, 7, bias=False)
    model.head.weight = model.embed.weight
    model.kernel = nn.Parameter(torch.ones(2, 4, 3))
    model.temperature = nn.Parameter(torch.ones(()))
    return model


def test_matrices_decay_and_vectors_and_scalars_do_not(model):
    decayed, undecayed = decay_groups(model.named_parameters(), 0.1)
    assert decayed["param_names"] == ["kernel", "embed.weight"]
    assert undecayed["param_names"] == ["temperature", "norm.weight", "norm.bias"]
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    for group in (decayed, undecayed):
        named = zip(group["param_names"], group["params"], strict=True)
        assert all(param is model.get_parameter(name) for name, param in named)


def test_a_tied_parameter_is_taken_once_by_its_first_name(model):
    twice = list(model.named_parameters(remove_duplicate=False))
    assert [name for name, param in twice if param is model.embed.weight] == ["embed.weight", "head.weight"]
    names = [name for group in decay_groups(twice, 0.1) for name in group["param_names"]]
    assert names.count("embed.weight") == 1
    assert "head.weight" not in names


@pytest.mark.parametrize("optimizer_cls", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor])
def test_torch_optimizers_take_the_groups_and_keep_the_names(model, optimizer_cls):
    groups = decay_groups(model.named_parameters(), 0.5)
    optimizer = optimizer_cls(groups, lr=0.1)
    assert [g["param_names"] for g in optimizer.state_dict()["param_groups"]] == [g["param_names"] for g in groups]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    moved = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert moved == {"embed.weight", "kernel"}  # with zero gradients only decay moves


@pytest.mark.parametrize("weight_decay", [-0.1, float("nan"), float("inf")])
def test_a_weight_decay_that_is_no_rate_is_refused(model, weight_decay):
    with pytest.raises(ValueError, match=r"^weight_decay: "):
        decay_groups(model.named_parameters(), weight_decay)
