"""Each class is asked what it may be given: torch's, and those that somebody may write."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.optim import Optimizer

from zeroshard.zero.optimizers.requirements import Scope, classify

ELEMENT_WISE = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
SCOPES = dict.fromkeys(ELEMENT_WISE, Scope.ELEMENT_WISE) | {
    "Adafactor": Scope.PER_TENSOR,
    "Muon": Scope.PER_TENSOR,
    "LBFGS": Scope.CLOSURE_DRIVEN,
    "SparseAdam": Scope.UNUSABLE,
}
SETTINGS = [
    ("SGD", {"lr": 0.0}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {"lr": torch.tensor(0.1), "foreach": True}),
    ("SGD", {"fused": True}),
    ("Adam", {"amsgrad": True, "foreach": False}),
    ("AdamW", {"fused": True, "lr": 1e-12}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("Adagrad", {"fused": True}),
    ("ASGD", {"lambd": 0.1, "t0": 1}),
    ("Rprop", {"maximize": True}),
]


class Own(Optimizer):
    """SGD of one's own; what is otherwise about it, its subclasses say."""

    def __init__(self, params, lr=0.1, **settings):
        super().__init__(params, {"lr": lr, **settings})

    def step(self, closure=None):
        loss = closure() if closure else None
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        param.sub_(group["lr"] * self.update(param, group))
        return loss

    def update(self, param, group):
        return param.grad


class TrustRatio(Own):
    def update(self, param, group):
        return param.grad * param.norm() / (param.grad.norm() + 1e-6)


class ClippedByTensor(Own):
    """Only gradients that are too large show it."""

    def update(self, param, group):
        return param.grad * (20.0 / param.grad.norm().clamp(min=20.0))


class ClippedByAll(Own):
    def update(self, param, group):
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm()
        return param.grad * (200.0 / norm.clamp(min=200.0))


class DecaysMatrices(Own):
    def update(self, param, group):
        return param.grad + 0.1 * param if param.dim() > 1 else param.grad


class CentresConvolutions(Own):
    def update(self, param, group):
        return param.grad - param.grad.mean((1, 2, 3), keepdim=True) if param.dim() == 4 else param.grad


class SkipsWhatHasNoGradient(Own):
    def update(self, param, group):
        return param.grad + 0.1 * param if param.grad.any() else torch.zeros_like(param)


class FactorsLargeMatrices(Own):
    def update(self, param, group):
        large = param.dim() == 2 and min(param.shape) >= 128
        return param.grad / (param.grad.square().mean(1, keepdim=True).sqrt() + 1e-6) if large else param.grad


class BlocksOf256(Own):
    """As the 8-bit optimizers: from 4096 elements on, one scale for each block of neighbours."""

    def update(self, param, group):
        if param.numel() < 4096:
            return param.grad
        flat = torch.nn.functional.pad(param.grad.reshape(-1), (0, -param.numel() % 256)).view(-1, 256)
        return (flat / (flat.abs().amax(1, keepdim=True) + 1e-6)).view(-1)[: param.numel()].view_as(param)


class ByItsPlace(Own):
    def update(self, param, group):
        return param.grad * (1 + group["params"].index(param))


class KeepsAHistory(Own):
    """Element by element, but a checkpoint could not cut its state where it cuts the parameter."""

    def update(self, param, group):
        history = self.state[param].setdefault("history", torch.zeros(2, *param.shape, dtype=param.dtype))
        history.copy_(torch.stack([history[1], param.grad]))
        return history.mean(0)


class Noisy(Own):
    def update(self, param, group):
        return param.grad + torch.randn_like(param)


class NoisyByNumpy(Own):
    def update(self, param, group):
        return param.grad * numpy.random.rand()


class NoisyByPython(Own):
    def update(self, param, group):
        return param.grad * random.random()


class SharpnessAware(Own):
    def step(self, closure=None):
        assert closure is not None, "give a closure"
        closure()
        super().step()
        return closure()


class AsksForItsLoss(Own):
    def step(self, closure):
        return super().step(closure)


class StandsStill(Own):
    def update(self, param, group):
        return 0.0


class Single(Own):
    """A kernel that knows one dtype."""

    def update(self, param, group):
        assert param.dtype == torch.float32
        return param.grad


class ByFlag(Own):
    def update(self, param, group):
        return param.grad / param.grad.norm().clamp(min=1e-6) if group["whole"] else param.grad


class ChangesItsSettings(Own):
    def __init__(self, params, betas):
        super().__init__(params, betas=betas)
        betas.append(1.0)


class NeedsASetting(Own):
    def __init__(self, params, rank):
        super().__init__(params, rank=rank)


OWN = [
    (Own, Scope.ELEMENT_WISE),
    (TrustRatio, Scope.PER_TENSOR),
    (ClippedByTensor, Scope.PER_TENSOR),
    (ClippedByAll, Scope.CROSS_TENSOR),
    (DecaysMatrices, Scope.PER_TENSOR),
    (CentresConvolutions, Scope.PER_TENSOR),
    (SkipsWhatHasNoGradient, Scope.PER_TENSOR),
    (FactorsLargeMatrices, Scope.PER_TENSOR),
    (BlocksOf256, Scope.PER_TENSOR),
    (ByItsPlace, Scope.CROSS_TENSOR),
    (KeepsAHistory, Scope.PER_TENSOR),
    (Noisy, Scope.RANDOM),
    (NoisyByNumpy, Scope.RANDOM),
    (NoisyByPython, Scope.RANDOM),
    (SharpnessAware, Scope.CLOSURE_DRIVEN),
    (AsksForItsLoss, Scope.ELEMENT_WISE),
    (StandsStill, Scope.UNUSABLE),
    (Single, Scope.ELEMENT_WISE),
]


def test_every_optimizer_of_torch_is_known_here():
    shipped = {n for n, v in vars(torch.optim).items() if isinstance(v, type) and issubclass(v, Optimizer)}
    assert shipped - {"Optimizer"} == SCOPES.keys()


@pytest.mark.parametrize(("name", "scope"), SCOPES.items())
def test_classes_of_torch(name, scope):
    kind = classify(getattr(torch.optim, name))
    assert kind.scope is scope
    assert kind.reason.startswith("it ")
    assert kind.refused == (name in ("LBFGS", "SparseAdam"))
    assert kind.ndims == {"Muon": (2,), "SparseAdam": ()}.get(name, (0, 1, 2, 3, 4))


@pytest.mark.parametrize(("name", "settings"), SETTINGS)
def test_what_works_element_by_element_does_in_every_form(name, settings):
    assert classify(getattr(torch.optim, name), settings).scope is Scope.ELEMENT_WISE


@pytest.mark.parametrize(("cls", "scope"), OWN, ids=lambda value: getattr(value, "__name__", value))
def test_classes_of_ones_own(cls, scope):
    kind = classify(cls)
    assert kind.scope is scope, kind.reason


def test_a_setting_decides_in_the_class_or_in_the_group():
    for whole, scope in ((False, Scope.ELEMENT_WISE), (True, Scope.PER_TENSOR)):
        assert classify(ByFlag, {"whole": whole}).scope is scope
        assert classify(ByFlag, {"whole": not whole}, {"whole": whole, "params": [1]}).scope is scope


def test_reasons_name_what_was_seen():
    assert "'row_var' of shape (5, 1) for a tensor of shape (5, 7)" in classify(torch.optim.Adafactor).reason
    assert "Muon only supports 2D parameters" in classify(torch.optim.Muon).reason
    assert "SparseAdam does not support dense gradients" in classify(torch.optim.SparseAdam).reason
    assert "calls the closure again" in classify(torch.optim.LBFGS).reason


def test_a_class_that_refuses_its_settings_says_so_itself():
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        classify(torch.optim.AdamW, {"lr": -1.0})
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rank'"):
        classify(NeedsASetting)
    assert classify(NeedsASetting, {"rank": 1}).scope is Scope.ELEMENT_WISE


def test_generators_and_settings_are_left_as_they_were():
    betas, lr = [0.9], torch.tensor(0.5)

    def draw():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    state = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = draw()
    random.setstate(state[0])
    numpy.random.set_state(state[1])
    torch.set_rng_state(state[2])
    classify(ChangesItsSettings, {"betas": betas})
    classify(torch.optim.Adam, {"lr": lr})
    for cls in (Noisy, NoisyByNumpy, NoisyByPython):

        class Another(cls):  # not one that is remembered
            pass

        assert classify(Another).scope is Scope.RANDOM
    assert draw() == expected
    assert (betas, lr.item()) == ([0.9], 0.5)


def test_the_answer_does_not_depend_on_modes_that_are_on():
    class Another(Own):
        pass

    with torch.no_grad():
        assert classify(Another).scope is Scope.ELEMENT_WISE
    with torch.inference_mode():
        assert classify(torch.optim.AdamW, {"eps": 1e-7}).scope is Scope.ELEMENT_WISE


def test_an_answer_is_remembered_by_settings_and_not_by_learning_rate_of_groups():
    class Counted(Own):
        built = 0

        def __init__(self, params, **settings):
            super().__init__(params, **settings)
            type(self).built += 1

    classify(Counted, {"lr": 0.1}, {"lr": 0.2})
    built = Counted.built
    classify(Counted, {"lr": 0.1}, {"lr": 0.3})
    assert Counted.built == built > 0
    classify(Counted, {"lr": 0.1, "extra": 1})
    assert Counted.built == 2 * built


def test_an_answer_takes_a_few_steps_of_tiny_tensors():
    sizes = []

    class Counted(torch.optim.AdamW):
        def step(self, closure=None):
            sizes.append(sum(param.numel() for group in self.param_groups for param in group["params"]))
            return super().step(closure)

    classify(Counted)
    assert 0 < len(sizes) <= 100
    assert max(sizes) <= 1 << 15
