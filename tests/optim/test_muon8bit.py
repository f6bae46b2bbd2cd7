import pytest
import torch
from torch import nn

from zeroshard import Zero
from zeroshard.comm import NullCommunicator
from zeroshard.kernels.state_codes import as_values
from zeroshard.optim import Muon8bit, MuonAdamW, MuonAdamW8bit, fp32_state_dict, muon, muon_groups


def pair(shape=(40, 70), **settings):
    """A matrix with torch's Muon, and a copy of it with ours."""
    torch.manual_seed(0)
    theirs = nn.Parameter(torch.randn(shape))
    ours = nn.Parameter(theirs.detach().clone())
    return theirs, torch.optim.Muon([theirs], 0.02, **settings), ours, Muon8bit([ours], 0.02, **settings)


def step_both(theirs, muon_, ours, low, num_steps):
    for _ in range(num_steps):
        theirs.grad = torch.randn(theirs.shape) + 0.3
        ours.grad = theirs.grad.clone()
        muon_.step()
        low.step()


@pytest.mark.parametrize("settings", [{}, {"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.5}])
@pytest.mark.parametrize("products", ["bfloat16", "fp32"])
def test_steps_are_near_those_of_torch_s_muon(settings, products, monkeypatch):
    monkeypatch.setattr("zeroshard.optim.muon.multiplies_bfloat16", lambda device: products == "bfloat16")
    theirs, muon_, ours, low = pair(**settings)
    first = theirs.detach().clone()
    step_both(theirs, muon_, ours, low, 20)
    assert (ours - theirs).norm() < 0.05 * (theirs - first).norm()


def test_the_first_step_is_torch_s_to_the_bit(monkeypatch):
    monkeypatch.setattr("zeroshard.optim.muon.multiplies_bfloat16", lambda device: True)
    theirs, muon_, ours, low = pair()
    step_both(theirs, muon_, ours, low, 1)
    assert torch.equal(ours, theirs)


def test_momentum_takes_a_byte_an_element_and_a_scale_a_block():
    _, _, ours, low = pair((33, 70))
    ours.grad = torch.randn(33, 70)
    low.step()
    state = low.state[ours]
    assert {kind: (value.dtype, tuple(value.shape)) for kind, value in state.items()} == {
        "momentum_buffer_codes": (torch.int8, (33, 70)),
        "momentum_buffer_scales": (torch.float32, (10,)),
    }


def test_states_pass_between_torch_s_muon_and_ours():
    theirs, muon_, ours, low = pair()
    step_both(theirs, muon_, ours, low, 3)
    kept, other = nn.Parameter(ours.detach().clone()), nn.Parameter(ours.detach().clone())
    again = Muon8bit([kept], 0.5)
    again.load_state_dict(muon_.state_dict())
    back = torch.optim.Muon([other], 0.5)
    back.load_state_dict(fp32_state_dict(low.state_dict()))
    momentum = muon_.state[theirs]["momentum_buffer"]
    for found in (as_values(again.state[kept]), back.state[other]):
        assert torch.allclose(found["momentum_buffer"], momentum, rtol=0.15, atol=5e-3)
    assert again.param_groups[0]["lr"] == back.param_groups[0]["lr"] == 0.02
    low.load_state_dict(low.state_dict())
    assert low.state[ours]["momentum_buffer_codes"].dtype == torch.int8


@pytest.mark.parametrize(
    ("params", "settings", "what"),
    [
        ([torch.ones(3)], {}, r"params: torch\.float32 of shape \(3,\); Muon8bit takes matrices"),
        ([torch.ones(3, 3, dtype=torch.float64)], {}, r"params: torch\.float64 of shape"),
        ([torch.ones(3, 3)], {"block": 100}, "block: 100 is no power of two"),
        ([torch.ones(3, 3)], {"lr": -1.0}, "Learning rate should be >= 0"),
    ],
)
def test_what_it_cannot_update_is_refused(params, settings, what):
    with pytest.raises(ValueError, match=what):
        Muon8bit([nn.Parameter(param) for param in params], **settings)


def test_both_rules_step_as_the_two_classes_do_and_load_states_of_fp32():
    torch.manual_seed(0)
    nets = [nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(20, 30)]), "head": nn.Linear(30, 5)}) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [
        cls(muon_groups(net.named_parameters(), 0.1, ["blocks"]), 0.01)
        for cls, net in zip((MuonAdamW, MuonAdamW8bit), nets, strict=True)
    ]
    first = nets[0]["blocks"][0].weight.detach().clone()
    for _ in range(5):
        for pairs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            pairs[0].grad = torch.randn(pairs[0].shape) + 0.3
            pairs[1].grad = pairs[0].grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (nets[0]["blocks"][0].weight - first).norm()
    for theirs, ours in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert (theirs - ours).norm() < 0.05 * moved
    saved = optimizers[0].state_dict()
    optimizers[1].load_state_dict(saved)
    kinds = {frozenset(state) for state in optimizers[1].state_dict()["state"].values()}
    assert {len(each) for each in kinds} == {2, 5}
    optimizers[0].load_state_dict(fp32_state_dict(optimizers[1].state_dict()))
    for key, state in optimizers[0].state_dict()["state"].items():
        assert state.keys() == saved["state"][key].keys()
    assert muon.MATRICES in optimizers[0].param_groups[0]


def test_under_zero_each_matrix_lies_whole_on_one_rank():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    zero = Zero(model, 3, list(model), NullCommunicator(4))
    low = zero.optimizer(Muon8bit, [param for param in model.parameters() if param.ndim == 2])
    assert {tuple(piece.shape) for piece in zero.pieces(low)} == {(64, 64)}
