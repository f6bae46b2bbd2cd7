"""What changes a model's parameters after `Zero()`: as in one process, checkpoints included, or refused in a line."""

import copy

import pytest
import torch
from torch import nn

import zeroshard
from zeroshard import Zero
from zeroshard.comm import run_threads
from zeroshard.zero import STAGES


class Model(nn.Module):
    """Embedding, blocks, a layer that may be absent, and a head that could share the embedding's matrix."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.extra = nn.Linear(8, 8)
        self.lone = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 10)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x) * self.lone
        return self.head(x if self.extra is None else self.extra(x))


torch.manual_seed(0)
FIRST = Model()


def _model():
    return copy.deepcopy(FIRST)


def _engine(comm, stage):
    model = _model()
    return model, Zero(model, stage=stage, comm=comm, units=["embed", "blocks", "head"])


def _train(model, optimizer, rank=None, num_steps=3):
    for step in range(num_steps):
        tokens = torch.randint(0, 10, (8, 5), generator=torch.Generator().manual_seed(step))
        tokens = tokens if rank is None else tokens.chunk(2)[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()


def _adamw(model):
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


class Half(nn.Module):
    """A parametrization."""

    def forward(self, weight):
        return weight * 0.5


def _swap(model):
    model.blocks[0], model.blocks[1] = model.blocks[1], model.blocks[0]


def _late(model):
    model.extra = copy.deepcopy(FIRST.blocks[2][0]).requires_grad_(False)
    return model.extra


WORK = {
    "a shared block": lambda model: model.blocks.__setitem__(1, model.blocks[0]),
    "a shared part of a block": lambda model: setattr(model, "extra", model.blocks[0][0]),
    "exchanged blocks": _swap,
    "a deleted block": lambda model: model.blocks.__delitem__(1),
    "fewer blocks": lambda model: setattr(model, "blocks", model.blocks[:2]),
    "a wrapped block": lambda model: model.blocks.__setitem__(1, nn.Sequential(model.blocks[1], nn.Identity())),
    "no bias": lambda model: setattr(model.head, "bias", None),
    "no layer": lambda model: setattr(model, "extra", None),
    "a new frozen layer": _late,
    "a parametrization": lambda model: nn.utils.parametrize.register_parametrization(model.extra, "weight", Half()),
    "a frozen head": lambda model: model.head.requires_grad_(False),
    "tied to the root unit's": lambda model: setattr(model.extra, "bias", model.lone),
    "the same parameter again": lambda model: setattr(model.head, "weight", model.head.weight),
}


@pytest.mark.redundant(but=["a deleted block-3", "a new frozen layer-0"])
@pytest.mark.filterwarnings("ignore:model. weights are read outside")  # register_parametrization tries it
@pytest.mark.pairwise("name")
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", WORK)
def test_a_module_may_be_moved_shared_wrapped_or_deleted(name, stage, tmp_path):
    change = WORK[name]
    plain = _model()
    change(plain)
    _train(plain, _adamw(plain))
    expected = plain.state_dict()

    def run(comm):
        model, zero = _engine(comm, stage)
        change(model)
        _train(model, _adamw(model), comm.rank)
        assert zero.full_grads().keys() == dict(plain.named_parameters()).keys()
        zeroshard.save(tmp_path / "c", zero, step=3)
        trained = zero.state_dict()
        again, loaded = _engine(comm, stage)
        change(again)
        loaded.optimizer(torch.optim.AdamW, [param for param in again.parameters() if param.requires_grad], lr=1e-2)
        zeroshard.load(tmp_path / "c", loaded)
        third, from_state = _engine(comm, stage)
        change(third)
        from_state.load_state_dict(trained)
        return trained, loaded.state_dict(), from_state.state_dict()

    trained, *others = run_threads(run, 2)[0]
    assert trained.keys() == expected.keys()
    for key, value in trained.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    for other in (*others, zeroshard.consolidate(tmp_path / "c")["model"]):
        assert other.keys() == trained.keys()
        assert all(torch.equal(value, trained[key]) for key, value in other.items())


def _tie(model):
    model.head.weight = model.embed.weight


def _tied_module(model):
    new = nn.Linear(8, 10)
    new.weight, new.bias = model.embed.weight, model.head.bias
    model.head = new


TIED = r"it was tied after Zero\(\) to a parameter that is gathered for the unit "
NEVER = r"a parameter that comes after Zero\(\) would never be trained"
REFUSED = {
    "tied": (_tie, rf"head.weight: {TIED}"),
    "tied in a new module": (_tied_module, rf"head.weight: {TIED}"),
    "tied under another name": (
        lambda model: model.extra.register_parameter("other", model.blocks[0][0].weight),
        rf"extra.other: {TIED}",
    ),
    "replaced": (lambda model: setattr(model.head, "weight", nn.Parameter(torch.ones(10, 8))), f"head.weight: {NEVER}"),
    "resized": (lambda model: setattr(model, "embed", nn.Embedding(12, 8)), f"embed.weight: {NEVER}"),
    "weight norm": (lambda model: nn.utils.parametrizations.weight_norm(model.extra), r"(extra\.param|weight)"),
    "a frozen module is trained": (lambda model: _late(model).requires_grad_(True), f"extra.weight: {NEVER}"),
    "a frozen module gets a parameter": (
        lambda model: setattr(_late(model), "more", nn.Parameter(torch.ones(3))),
        f"extra.more: {NEVER}",
    ),
    "a frozen module is tied": (
        lambda model: setattr(_late(model), "weight", model.blocks[0][0].weight),
        f"extra.weight: {TIED}",
    ),
    "an entry is overwritten": (
        lambda model: model.head._parameters.__setitem__("bias", nn.Parameter(torch.zeros(10))),
        f"head.bias: {NEVER}",
    ),
}


@pytest.mark.redundant(but=["a frozen module is tied-2", "an entry is overwritten-0"])
@pytest.mark.filterwarnings("ignore:model. weights are read outside")  # weight_norm does
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_the_engine_cannot_follow_is_refused_before_the_next_forward(name, stage):
    change, what = REFUSED[name]

    def run(comm):
        model, zero = _engine(comm, stage)
        optimizer = zero.optimizer(torch.optim.AdamW)
        with pytest.raises(RuntimeError, match=f"^{what}"):
            _train((change(model), model)[1], optimizer, comm.rank)

    run_threads(run, 2)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_that_was_resized_in_place_is_named(stage):
    """As `resize_token_embeddings` does it where the embedding is tied."""

    def run(comm):
        model, zero = _engine(comm, stage)
        optimizer = zero.optimizer(torch.optim.AdamW)
        _train(model, optimizer, comm.rank)
        weights = zero.state_dict()["embed.weight"]
        what = r"is a tensor of shape \(12, 8\) now; .* keeps its shape, \(10, 8\): resize it before Zero\(\)$"
        what = "was assigned to while the weights were sharded" if stage == 3 else what

        def resize_and_train():
            model.embed.weight.data = torch.cat([weights, weights[:2]])
            _train(model, optimizer, comm.rank)

        with pytest.raises(RuntimeError, match=f"^embed.weight: its .data {what}"):
            resize_and_train()

    run_threads(run, 2)


def test_a_module_that_left_again_may_be_trained_elsewhere():
    """`_train` raises `Hazard` if it is."""

    def run(comm):
        model, zero = _engine(comm, 3)
        optimizer = zero.optimizer(torch.optim.AdamW)
        model.judge = judge = nn.Linear(8, 8).requires_grad_(False)
        copy.deepcopy(judge)
        del model.judge
        judge.requires_grad_(True)
        _train(model, optimizer, comm.rank)
        zero.remove()
        _tie(model)

    run_threads(run, 2)
