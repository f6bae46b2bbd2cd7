"""Each class is asked what it may be given: torch's, and those that somebody may write."""

import itertools
import random
from typing import ClassVar

import numpy
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from estimating import Estimates
from zeroshard.comm import NullCommunicator
from zeroshard.optim.classes import answers
from zeroshard.optim.classes.probe import probe
from zeroshard.optim.classes.reach import OF_TORCH
from zeroshard.optim.classes.requirements import Reach, classify
from zeroshard.zero import OptimizerKind, Zero
from zeroshard.zero.sharded_optimizer.optimizer import ShardedOptimizer

SETTINGS = [
    ("SGD", {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "foreach": True}),
    ("AdamW", {"amsgrad": True, "fused": True, "lr": 1e-12}),
    ("RMSprop", {"centered": True, "momentum": 0.5}),
    ("ASGD", {"lambd": 0.1, "t0": 1}),
    ("Rprop", {"maximize": True, "lr": 0.0}),
]
FIRST = (torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS, torch.optim.SparseAdam)
SOAK = pytest.mark.soak
CPU = torch.device("cpu")


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


def factors_large_matrices(self, p, group):
    large = p.dim() == 2 and min(p.shape) >= 128
    return p.grad / (p.grad.square().mean(1, keepdim=True).sqrt() + 1e-6) if large else p.grad


def blocks_of_256(self, p, group):
    """As the 8-bit optimizers: from 4096 elements on, one scale for each block of neighbours."""
    if p.numel() < 4096:
        return p.grad
    flat = torch.nn.functional.pad(p.grad.reshape(-1), (0, -p.numel() % 256)).view(-1, 256)
    return (flat / (flat.abs().amax(1, keepdim=True) + 1e-6)).view(-1)[: p.numel()].view_as(p)


def keeps_a_history(self, p, group):
    """Element by element, but a checkpoint could not cut its state where it cuts the parameter."""
    history = self.state[p].setdefault("history", torch.zeros(2, *p.shape, dtype=p.dtype))
    history.copy_(torch.stack([history[1], p.grad]))
    return history.mean(0)


def knows_one_dtype(self, p, group):
    assert p.dtype == torch.float32
    return p.grad


# How somebody's own class updates a parameter, and what that asks of the engine.
OWN = {
    "as it is": (lambda self, p, group: p.grad, Reach.ELEMENT_WISE),
    "trust ratio": (lambda self, p, group: p.grad * p.norm() / (p.grad.norm() + 1e-6), Reach.PER_TENSOR),
    # Only gradients that are too large show these two.
    "clipped": (lambda self, p, group: p.grad * (20.0 / p.grad.norm().clamp(min=20.0)), Reach.PER_TENSOR),
    "clipped by all": (
        lambda self, p, group: (
            p.grad * (200.0 / torch.stack([each.grad.norm() for each in group["params"]]).norm().clamp(min=200.0))
        ),
        Reach.CROSS_TENSOR,
    ),
    "decays matrices": (lambda self, p, group: p.grad + 0.1 * p if p.dim() > 1 else p.grad, Reach.PER_TENSOR),
    "centres convolutions": (
        lambda self, p, group: p.grad - p.grad.mean((1, 2, 3), keepdim=True) if p.dim() == 4 else p.grad,
        Reach.PER_TENSOR,
    ),
    "skips what has no gradient": (
        lambda self, p, group: p.grad + 0.1 * p if p.grad.any() else torch.zeros_like(p),
        Reach.PER_TENSOR,
    ),
    "factors large matrices": (factors_large_matrices, Reach.PER_TENSOR),
    "blocks of 256": (blocks_of_256, Reach.PER_TENSOR),
    "by its place": (lambda self, p, group: p.grad * (1 + group["params"].index(p)), Reach.CROSS_TENSOR),
    "keeps a history": (keeps_a_history, Reach.PER_TENSOR),
    "torch's noise": (lambda self, p, group: p.grad + torch.randn_like(p), Reach.RANDOM),
    "numpy's noise": (lambda self, p, group: p.grad * numpy.random.rand(), Reach.RANDOM),
    "Python's noise": (lambda self, p, group: p.grad * random.random(), Reach.RANDOM),
    "stands still": (lambda self, p, group: 0.0, Reach.UNUSABLE),
    "knows one dtype": (knows_one_dtype, Reach.ELEMENT_WISE),
}


def own(name, **attributes):
    """A class that nobody has asked about yet."""
    return type("Another", (Own,), {"update": OWN[name][0], **attributes})


class SharpnessAware(Own):
    def step(self, closure=None):
        assert closure is not None, "give a closure"
        closure()
        super().step()
        return closure()


class AsksForItsLoss(Own):
    def step(self, closure):
        return super().step(closure)


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


def test_every_optimizer_of_torch_is_known():
    shipped = {kind for kind in vars(torch.optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert shipped - {Optimizer} == OF_TORCH.keys()


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        *(pytest.param(cls, {}, marks=() if cls in FIRST else SOAK) for cls in OF_TORCH),
        *(pytest.param(getattr(torch.optim, name), settings, marks=SOAK) for name, settings in SETTINGS),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_table_says_what_the_experiment_says_of_a_class_of_torch(cls, settings):
    found, kind = probe(cls, settings, {}, CPU), classify(cls, settings)
    assert (found.reach, found.ndims, found.reach.refused) == (kind.reach, kind.ndims, kind.reach.refused)
    assert kind.reason.startswith("it ")


def test_no_optimizer_of_torch_is_tried_when_a_model_is_trained(monkeypatch):
    def tried(cls, *_):
        raise AssertionError(f"{cls.__name__} was tried")

    monkeypatch.setattr(answers, "probe", tried)
    for cls in OF_TORCH.keys() - {torch.optim.LBFGS, torch.optim.SparseAdam}:
        model = nn.Sequential(nn.Linear(4, 4, bias=False))
        Zero(model, 2, comm=NullCommunicator(2)).optimizer(cls, model.parameters())
    with pytest.raises(AssertionError, match="Own was tried"):
        classify(type("Own", (Own,), {}))


@pytest.mark.redundant
def test_a_subclass_of_a_class_of_torch_is_not_taken_for_it():
    class AdamW(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            params = self.param_groups[0]["params"]
            total = sum(param.grad.sum() for param in params)
            for param in params:
                param.add_(total)

    assert classify(AdamW).reach is Reach.CROSS_TENSOR


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("cls", "reach"),
    [
        *(pytest.param(own(name), reach, id=name) for name, (_, reach) in OWN.items()),
        (SharpnessAware, Reach.CLOSURE_DRIVEN),
        (AsksForItsLoss, Reach.ELEMENT_WISE),
    ],
)
def test_classes_of_ones_own(cls, reach):
    kind = classify(cls)
    assert kind.reach is reach, kind.reason


@pytest.mark.redundant
def test_a_setting_decides_in_the_class_or_in_the_group():
    for whole, reach in ((False, Reach.ELEMENT_WISE), (True, Reach.PER_TENSOR)):
        assert classify(ByFlag, {"whole": whole}).reach is reach
        assert classify(ByFlag, {"whole": not whole}, {"whole": whole, "params": [1]}).reach is reach


@pytest.mark.redundant
def test_a_class_that_refuses_its_settings_says_so_itself():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rank'"):
        classify(NeedsASetting)
    assert classify(NeedsASetting, {"rank": 1}).reach is Reach.ELEMENT_WISE
    with pytest.raises(ValueError, match=r"Invalid learning rate: -1\.0"):
        Zero(nn.Linear(4, 4), 2, comm=NullCommunicator(2)).optimizer(torch.optim.AdamW, lr=-1.0)


def test_a_class_that_takes_no_param_groups_is_told_so():
    class Listed(Own):
        def __init__(self, params):
            super().__init__([param for param in params if param.numel()])

    assert classify(Listed).reason == "it takes a list of parameters alone, and is given param groups here"


@pytest.mark.redundant
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
    for name in ("torch's noise", "numpy's noise", "Python's noise"):
        assert classify(own(name)).reach is Reach.RANDOM
    assert draw() == expected
    assert (betas, lr.item()) == ([0.9], 0.5)


@pytest.mark.redundant
def test_the_answer_does_not_depend_on_modes_that_are_on():
    Another = own("as it is")
    with torch.no_grad():
        assert classify(Another).reach is Reach.ELEMENT_WISE
    with torch.inference_mode():
        assert classify(torch.optim.AdamW).reach is Reach.ELEMENT_WISE
        assert classify(Another, {"extra": 1}).reach is Reach.ELEMENT_WISE
    with torch.device("meta"):
        assert classify(torch.optim.AdamW).reach is Reach.ELEMENT_WISE
        assert classify(Another, {"extra": 2}).reach is Reach.ELEMENT_WISE


# -- classes that declare their reach -----------------------------------------------------------------------------


class Untried(Own):
    """Neither built nor stepped."""

    def __init__(self, params, **settings):
        raise AssertionError


@pytest.mark.parametrize("given", [Reach.PER_TENSOR, "per-tensor", lambda settings: "per-tensor"])
def test_a_class_may_declare_its_reach_and_is_not_tried(given):
    kind = classify(type("Declared", (Untried,), {"zero_reach": given}), {"lr": 0.1})
    assert kind == OptimizerKind(Reach.PER_TENSOR, "it is declared per-tensor by its zero_reach", (0, 1, 2, 3, 4))


def test_a_declaration_may_depend_on_settings_and_say_which_dimensions():
    class Declared(Untried):
        @staticmethod
        def zero_reach(settings):
            if settings.get("matrices"):
                return OptimizerKind(Reach.PER_TENSOR, "it takes matrices", (2,))
            return Reach.ELEMENT_WISE

    assert classify(Declared).reach is Reach.ELEMENT_WISE
    matrices = OptimizerKind(Reach.PER_TENSOR, "it takes matrices", (2,))
    assert classify(Declared, {"matrices": True}) == matrices
    assert classify(Declared, {"matrices": False}, {"matrices": True, "params": [1]}) == matrices
    assert classify(Declared, {"matrices": True}, {"matrices": False}).reach is Reach.ELEMENT_WISE


@pytest.mark.redundant
def test_a_declaration_is_not_inherited_and_holds_for_a_class_that_was_tried_before():
    declared = own("trust ratio", zero_reach="element-wise")
    heir = type("Heir", (declared,), {})
    assert classify(declared).reach is Reach.ELEMENT_WISE
    assert classify(heir).reach is Reach.PER_TENSOR
    heir.zero_reach = "element-wise"
    assert classify(heir).reach is Reach.ELEMENT_WISE


def test_a_declaration_that_is_no_reach_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Declared.zero_reach: 'elementwise' is no reach; give .* 'element-wise', "):
        classify(type("Declared", (Own,), {"zero_reach": "elementwise"}))


def test_the_engine_takes_a_class_at_its_word():
    def shapes(reach):
        model = nn.Linear(6, 4)
        zero = Zero(model, 2, comm=NullCommunicator(2))
        zero.optimizer(own("trust ratio", zero_reach=reach))
        return [piece.dim() for piece in zero.pieces()]

    assert shapes("per-tensor") == [2]  # the vector lies on the other rank
    assert shapes("element-wise") == [1]
    with pytest.raises(ValueError, match="Another cannot be sharded: it is declared cross-tensor by its zero_reach"):
        shapes("cross-tensor")


# -- parameters on a GPU: unknown classes are tried on the CPU ----------------------------------------------------


@pytest.mark.redundant
def test_a_class_is_tried_on_the_cpu_once_wherever_its_parameters_live():
    class Counted(Own):
        devices: ClassVar = []

        def __init__(self, params, **settings):
            super().__init__(params, **settings)
            self.devices += [param.device for group in self.param_groups for param in group["params"]]

    assert classify(Counted, device="cuda:0").reach is Reach.ELEMENT_WISE
    assert set(Counted.devices) == {CPU}
    num_built = len(Counted.devices)
    classify(Counted, device="cuda:1")
    assert len(Counted.devices) == num_built


@pytest.mark.redundant
def test_settings_for_parameters_on_a_gpu_are_translated():
    class Another(torch.optim.AdamW):
        pass

    numbers = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": True}
    for settings in ({"capturable": True}, {"capturable": True, **numbers}):
        assert classify(Another, settings, device="cuda").reach is Reach.ELEMENT_WISE
        assert classify(Another, settings).reach is Reach.UNUSABLE


def test_a_class_that_runs_on_gpus_alone_is_told_to_declare_its_reach():
    class StepsElsewhere(Own):
        def update(self, param, group):
            raise RuntimeError("no CPU here")

    class BuiltElsewhere(Own):
        def __init__(self, params):
            raise RuntimeError("no CPU here")

    kind = classify(StepsElsewhere, device="cuda")
    assert kind.reach is Reach.UNUSABLE
    assert kind.reason == (
        "it fails on dense gradients: RuntimeError: no CPU here (tried on the CPU; a class that runs on other devices "
        "only declares its reach by the attribute zero_reach)"
    )
    assert "zero_reach" not in classify(StepsElsewhere).reason
    with pytest.raises(RuntimeError, match="no CPU here") as caught:
        classify(BuiltElsewhere, device="cuda")
    assert caught.value.__notes__ == ["BuiltElsewhere was " + kind.reason.partition("(")[2].removesuffix(")")]


# -- classes that begin something later ------------------------------------------------------------------------------


class Later(Own):
    """After some steps it divides by the RMS of the tensor, or of all; where it counts them, its subclasses say."""

    def __init__(self, params, lr=0.1, over="tensor", **settings):
        self.steps_done, self.clock = 0, {"now": 0}
        super().__init__(params, lr, over=over, **settings)

    def began(self, group):
        return False

    def step(self, closure=None):
        self.count()
        return super().step(closure)

    def count(self):
        return None

    def update(self, param, group):
        if not self.began(group):
            return param.grad
        among = [param] if group["over"] == "tensor" else [p for p in group["params"] if p.grad is not None]
        return param.grad / (1e-6 + sum(each.grad.square().sum() for each in among).sqrt())


class CountsInItsGroup(Later):
    def __init__(self, params, warm=10, **settings):
        super().__init__(params, warm=warm, k=0, **settings)

    def count(self):
        for group in self.param_groups:
            group["k"] += 1

    def began(self, group):
        return group["k"] > group["warm"]


class CountsInItsState(CountsInItsGroup):
    def count(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["step"] = self.state[param].get("step", torch.zeros(())) + 1

    def began(self, group):
        return self.state[group["params"][0]]["step"] > group["warm"]


class CountsInANumberOfItsState(CountsInItsGroup):
    def count(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["n"] = self.state[param].get("n", 0) + 1

    def began(self, group):
        return self.state[group["params"][0]]["n"] == group["warm"]


class CountsInAnAttribute(Later):
    def count(self):
        self.steps_done += 1

    def began(self, group):
        return self.steps_done > 500


class CountsInADict(Later):
    def count(self):
        self.clock["now"] += 1

    def began(self, group):
        return self.clock["now"] >= 25


class CountsByALength(Later):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.seen = []

    def count(self):
        self.seen.append(1.0)

    def began(self, group):
        return len(self.seen) > 40


class CountsInAnIterator(Later):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.seen = itertools.count()

    def count(self):
        self.steps_done = next(self.seen) > 20

    def began(self, group):
        return self.steps_done


class EndsLater(CountsInItsGroup):
    """It knows as many steps as it has entries."""

    def update(self, param, group):
        return param.grad * [0.1] * 200 if group["k"] > 200 else param.grad


SEEN = [CountsInItsGroup, CountsInItsState, CountsInANumberOfItsState, CountsInAnAttribute, CountsInADict]


@pytest.mark.redundant
@pytest.mark.parametrize("cls", SEEN)
def test_what_a_class_begins_later_is_seen(cls):
    assert classify(cls).reach is Reach.PER_TENSOR
    assert classify(cls, {"over": "all"}).reach is Reach.CROSS_TENSOR
    assert "from a later step on" in classify(cls).reason


@pytest.mark.redundant
@pytest.mark.parametrize("warm", [345, pytest.param(6789, marks=SOAK)])
def test_a_setting_that_names_a_step_is_tried_around_it(warm):
    for cls in (CountsInItsGroup, CountsInANumberOfItsState):
        assert classify(cls, {"warm": warm}).reach is Reach.PER_TENSOR
        assert classify(cls, {"warm": warm, "over": "all"}).reach is Reach.CROSS_TENSOR


@pytest.mark.redundant
@pytest.mark.parametrize("cls", [CountsByALength, CountsInAnIterator, EndsLater])
def test_a_class_whose_later_steps_cannot_be_tried_gets_whole_tensors(cls):
    assert classify(cls).reach is Reach.PER_TENSOR


class AlwaysAlike(CountsInItsState):
    def began(self, group):
        return False


@pytest.mark.redundant
def test_a_class_that_counts_and_changes_nothing_stays_element_wise():
    assert classify(AlwaysAlike).reach is Reach.ELEMENT_WISE


# -- what the progress of training, the user's dtype and a closure's loss show -----------------------------------------


class LowersItsRate(Own):
    """If a mean over ten steps has improved on that of the ten before: of a tensor's gradients, or of all tensors'."""

    def __init__(self, params, over="tensor", **settings):
        super().__init__(params, over=over, **settings)

    def update(self, param, group):
        among = [param] if group["over"] == "tensor" else group["params"]
        means = self.state[param].setdefault("means", [])
        means.append(float(sum(p.grad.abs().sum() for p in among) / sum(p.numel() for p in among)))
        return param.grad * (0.5 if len(means) >= 20 and sum(means[-10:]) < sum(means[-20:-10]) else 1.0)


class RoundsAtRandom(Own):
    """Unless the weights are wide enough."""

    def update(self, param, group):
        noise = torch.rand_like(param) if param.dtype == group.get("narrow", torch.float32) else 1.0
        return param.grad * noise


class RoundsAllAtRandom(RoundsAtRandom):
    def update(self, param, group):
        return super().update(param, group) / torch.stack([each.grad.norm() for each in group["params"]]).norm()


class InTrainingMode(Own):
    mode = None

    def train(self):
        self.mode = "train"

    def step(self, closure=None):
        assert self.mode == "train", "call train() first"
        return super().step(closure)


class FollowsItsLoss(Own):
    """If a closure gives it one."""

    def step(self, closure=None):
        self.loss = float(closure()) if closure else 1.0
        return super().step()

    def update(self, param, group):
        return param.grad * self.loss


class NeedsItsLoss(FollowsItsLoss):
    def step(self, closure):
        return super().step(closure)


def test_what_follows_the_progress_of_training_is_seen():
    for rate in (1.0, 1e-3, 0.0):
        kind = classify(Estimates, {"lr": rate})
        assert kind.reach is Reach.CROSS_TENSOR
        assert kind.reason.startswith("as training makes progress it lets the gradients of one tensor change")
    assert classify(LowersItsRate).reach is Reach.PER_TENSOR
    assert classify(LowersItsRate, {"over": "all"}).reach is Reach.CROSS_TENSOR


@pytest.mark.redundant
def test_a_group_with_another_learning_rate_is_tried_at_that_rate():
    class AboveTen(Own):
        def update(self, param, group):
            return param.grad / param.grad.norm() if group["lr"] > 10 else param.grad

    assert classify(AboveTen, {}, {"lr": 1.0}).reach is Reach.ELEMENT_WISE
    assert classify(AboveTen, {}, {"lr": 11.0}).reach is Reach.PER_TENSOR


@pytest.mark.redundant(but=["dtype0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_rounding_in_the_dtype_of_the_weights_is_seen(dtype):
    assert classify(RoundsAtRandom, {"narrow": dtype}, dtype=dtype).reach is Reach.RANDOM
    assert classify(RoundsAtRandom, {"narrow": torch.float16}, dtype=dtype).reach is Reach.ELEMENT_WISE
    assert classify(RoundsAllAtRandom, {"narrow": dtype}, dtype=dtype).reach is Reach.RANDOM  # at stage 0 too
    assert classify(RoundsAllAtRandom, {"narrow": torch.float16}, dtype=dtype).reach is Reach.CROSS_TENSOR
    model = nn.Linear(4, 4).to(dtype)
    with pytest.raises(ValueError, match=f"RoundsAtRandom cannot be sharded: in {dtype} it draws random numbers"):
        Zero(model, 0, comm=NullCommunicator(2)).optimizer(RoundsAtRandom, narrow=dtype)


@pytest.mark.redundant
def test_a_class_that_takes_matrices_in_one_dtype_alone_is_tried_in_it():
    class MatricesInFp32(Own):
        def update(self, param, group):
            assert param.dim() < 2 or param.dtype == torch.float32
            return param.grad / param.grad.norm() if param.dim() == 2 else param.grad

    assert classify(MatricesInFp32).reach is Reach.PER_TENSOR
    assert classify(MatricesInFp32).ndims == (0, 1, 2, 3, 4)


def test_a_class_with_modes_is_tried_in_that_of_training():
    assert classify(InTrainingMode).reach is Reach.ELEMENT_WISE


def test_a_loss_that_changes_the_update_is_seen_and_no_step_may_give_it():
    kind = classify(FollowsItsLoss)
    assert (kind.reach, kind.no_closure) == (Reach.ELEMENT_WISE, classify(NeedsItsLoss).reason)
    assert classify(NeedsItsLoss).reach is Reach.CLOSURE_DRIVEN
    assert kind.no_closure == "it follows the loss that its closure returns, and each rank has the loss of its own rows"
    assert classify(AsksForItsLoss).no_closure == classify(InTrainingMode).no_closure == ""
    model = nn.Linear(4, 4)
    optims = [ShardedOptimizer(nn.Linear(4, 4).parameters(), FollowsItsLoss), Zero(model).optimizer(FollowsItsLoss)]
    for optim in optims:
        with pytest.raises(ValueError, match=r"^step: FollowsItsLoss may not have a closure: it follows the loss"):
            optim.step(lambda: model(torch.ones(4)).sum())
    model(torch.ones(4)).sum().backward()
    optims[1].step()
