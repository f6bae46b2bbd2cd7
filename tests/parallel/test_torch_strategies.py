"""PyTorch's strategies behind our interface, on gloo ranks: how they begin, averages, what is resident, refusals.

That they train as one process does is in tests/equivalence, and what they save in tests/checkpoint/test_matrix.py.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator
from zeroshard.parallel import Setup, build_strategy, strategies_with

THEIRS = sorted(strategies_with("over_torch"))
WORLD_SIZES = [1, 2, 3]


class Net(nn.Module):
    """Tied, frozen and one-element parameters, a buffer, and rows that no world divides; two blocks."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(2))
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor([2.0]))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return (self.scale * self.last(x) + self.frozen.sum()).square().mean()


def _net(seed=0):
    torch.manual_seed(seed)
    return Net()


def _setup(comm, model=None, **changes):
    model = _net() if model is None else model
    values = {
        "model": model,
        "units": list(getattr(model, "blocks", ())),
        "comm": comm,
        "optimizer_cls": torch.optim.AdamW,
        "param_groups": lambda module: [{"params": [p for p in module.parameters() if p.requires_grad]}],
        "optimizer_kwargs": {"lr": 0.02},
    }
    return Setup(**{**values, **changes})


def _rows(step):
    """[2 micro-batches, 6 rows, 5]: of all ranks together."""
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(step))


def _steps(strategy, steps):
    """Accumulated over two micro-batches and clipped; the norms."""
    comm, norms = strategy.comm, []
    for step in steps:
        for index, rows in enumerate(_rows(step)):
            with strategy.micro_batch(last=index == 1):
                (strategy.model(rows.chunk(comm.world_size)[comm.rank]) / 2).backward()
        norms.append(float(strategy.clip_grad_norm_(0.5)))
        strategy.optimizer.step()
        strategy.optimizer.zero_grad()
    return norms


def _assert_close(state, expected):
    assert list(state) == list(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-5)


def started_from_rank_zero(comm, name):
    strategy = build_strategy(name, _setup(comm, _net(seed=comm.rank)))
    return dict(strategy.state_dict())


@pytest.mark.redundant
@pytest.mark.parametrize("name", THEIRS)
def test_training_starts_from_rank_zeros_weights(name, gloo_ranks):
    expected = _net(seed=0).state_dict()
    for state in gloo_ranks(3).run(started_from_rank_zero, name):
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())


def _ones_by_name(name, tensor):
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + len(name))


def made_from_meta(comm):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4, bias=False))
    setup = _setup(comm, model, units=list(model), init=_ones_by_name, device=torch.device("cpu"))
    return dict(build_strategy("fsdp2", setup).state_dict())


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_fsdp2_makes_a_model_from_the_meta_device_alike_in_any_world(world_size, gloo_ranks):
    with torch.no_grad():
        expected = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 4, bias=False))
        for name, param in expected.named_parameters():
            _ones_by_name(name, param)
    for state in gloo_ranks(world_size).run(made_from_meta):
        assert all(torch.equal(state[key], tensor) for key, tensor in expected.state_dict().items())


def saved(comm, name, path):
    strategy = build_strategy(name, _setup(comm))
    _steps(strategy, range(2))
    checkpoint.save(path, strategy, step=2)
    return dict(strategy.state_dict())


@pytest.mark.redundant(but=["zero1-torch"])
@pytest.mark.parametrize("name", THEIRS)
def test_a_tied_tensor_is_in_a_checkpoint_under_all_of_its_names(name, gloo_ranks, tmp_path):
    weights = gloo_ranks(3).run(saved, name, tmp_path / "c")[0]
    whole = checkpoint.consolidate(tmp_path / "c")
    assert whole["model"].keys() == weights.keys()
    assert all(torch.equal(whole["model"][key], tensor) for key, tensor in weights.items())
    (group,) = whole["optimizer"]["param_groups"]
    assert set(group["params"]) == set(whole["optimizer"]["state"])


def loaded_after_an_evaluation(comm, path):
    other = build_strategy("fsdp2", _setup(comm, _net(seed=1)))
    other.model.eval()
    with torch.no_grad():
        other.model(_rows(0)[0])
        checkpoint.load(path, other)
        return dict(other.state_dict()), float(other.model(_rows(0)[0]))


@pytest.mark.redundant
def test_fsdp2_does_not_go_on_with_weights_that_it_kept_after_an_evaluation(gloo_ranks, tmp_path):
    weights = gloo_ranks(2).run(saved, "fsdp2", tmp_path / "c")[0]
    model = _net()
    model.load_state_dict(weights)
    for state, loss in gloo_ranks(2).run(loaded_after_an_evaluation, tmp_path / "c"):
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
        assert loss == pytest.approx(float(model(_rows(0)[0]).detach()), rel=1e-6)


EMA_DECAY = 0.75


def _average(strategy):
    with strategy.ema.weights():
        return dict(strategy.state_dict())


def averaged(comm, name):
    """Four steps with an average, and the loss of that."""
    strategy = build_strategy(name, _setup(comm, ema_decay=EMA_DECAY))
    for step in range(4):
        _steps(strategy, [step])
        strategy.ema.update()
    weights, average = dict(strategy.state_dict()), _average(strategy)
    with torch.no_grad():  # FSDP2 keeps the root's weights after such a forward
        before = float(strategy.model(_rows(9)[0]))
        with strategy.ema.weights():
            loss = float(strategy.model(_rows(9)[0]))
        assert float(strategy.model(_rows(9)[0])) == before != loss
    with strategy.ema.weights(), strategy.full_params(), torch.no_grad():
        assert float(strategy.model(_rows(9)[0])) == loss
        with pytest.raises(RuntimeError, match=r"leave ema\.weights"):
            list(strategy.named_shards())
        with pytest.raises(RuntimeError, match=r"leave ema\.weights"):
            strategy.load_named_shards(None)
    assert all(torch.equal(strategy.state_dict()[key], tensor) for key, tensor in weights.items())
    strategy.model(_rows(4)[0]).backward()  # with the weights, not with the average
    return average, loss, float(strategy.clip_grad_norm_(1e9)), strategy.memory_bytes()["ema"]


@pytest.fixture(scope="module")
def average_by_hand():
    """Of one process, by torch's own average: the weights, their loss, and the gradient's norm after it."""
    strategy = build_strategy("ddp", _setup(LocalCommunicator()))
    swa = torch.optim.swa_utils
    average = swa.AveragedModel(strategy.model, multi_avg_fn=swa.get_ema_multi_avg_fn(EMA_DECAY))
    average.update_parameters(strategy.model)
    for step in range(4):
        _steps(strategy, [step])
        average.update_parameters(strategy.model)
    with torch.no_grad():
        loss = float(average.module(_rows(9)[0]))
    strategy.model(_rows(4)[0]).backward()
    return average.module.state_dict(), loss, float(strategy.clip_grad_norm_(1e9))


@pytest.mark.redundant(but=["zero1-torch-2"])
@pytest.mark.parametrize(("name", "world_size"), [("ddp", 3), ("fsdp2", 3), ("zero1-torch", 2), ("zero3", 2)])
def test_an_average_is_torchs(name, world_size, average_by_hand, gloo_ranks):
    weights, loss, norm = average_by_hand
    for found in gloo_ranks(world_size).run(averaged, name):
        _assert_close(found[0], weights)
        assert found[1:3] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5))
        assert found[3] > 0


def unsharded_inside(comm, name):
    strategy = build_strategy(name, _setup(comm))
    found = []
    for steps in ([], range(1)):  # before the first forward, too
        _steps(strategy, steps)
        expected = strategy.state_dict()
        with strategy.full_params(), torch.no_grad():
            losses = [float(strategy.model(_rows(0)[0])) for _ in range(2)]
            module = strategy.model.module if isinstance(strategy.model, nn.parallel.DistributedDataParallel) else None
            weights = dict((module or strategy.model).named_parameters())
            same = all(type(w) is nn.Parameter and torch.equal(w, expected[n]) for n, w in weights.items())
        outside = float(strategy.model(_rows(0)[0]).detach())
        found.append(same and losses == [outside, outside])
    return found


@pytest.mark.parametrize("name", THEIRS)
def test_weights_are_unsharded_inside_full_params(name, gloo_ranks):
    for found in gloo_ranks(2).run(unsharded_inside, name):
        assert found == [True, True]


def resident(comm, name, dtype):
    strategy = build_strategy(name, _setup(comm, compute_dtype=dtype))
    strategy.model(_rows(0)[0]).backward()
    strategy.optimizer.step()
    return strategy.memory_bytes()


def test_memory_is_counted_by_category(gloo_ranks):
    trained, frozen, num_trained = 25 + 2 * (35 + 7 + 35 + 5) + 5 + 1, 3, 11
    # Of 5 rows each rank holds 3, and so on: FSDP2 pads every rank to the first one's number.
    rows, frozen_rows = 15 + 2 * (20 + 4 + 21 + 3) + 3 + 1, 2
    for name, dtype, expected in [
        ("ddp", torch.float32, (trained + frozen, trained, 0)),
        ("zero1-torch", torch.float32, (trained + frozen, trained, 0)),
        ("fsdp2", torch.float32, (rows + frozen_rows, rows, 0)),
        ("fsdp2", torch.bfloat16, (0, rows, rows + frozen_rows)),
    ]:
        by_rank = gloo_ranks(2).run(resident, name, dtype)
        for memory in by_rank:
            assert tuple(memory[kind] // 4 for kind in ("params", "grads", "master")) == expected
        if name == "ddp":
            assert [memory["optimizer"] for memory in by_rank] == [4 * (2 * trained + num_trained)] * 2
        if name == "zero1-torch":  # whole tensors, some here and some there
            assert sum(memory["optimizer"] for memory in by_rank) == 4 * (2 * trained + num_trained)
            assert max(memory["optimizer"] for memory in by_rank) < 0.6 * 4 * (2 * trained + num_trained)


@pytest.mark.redundant(but=["fsdp2"])
@pytest.mark.parametrize("name", ["zero1-torch", "fsdp2"])
def test_without_a_process_group_they_are_refused(name):
    for comm in (None, LocalCommunicator(), NullCommunicator(2)):
        with pytest.raises(ValueError, match="init_process_group"):
            build_strategy(name, _setup(comm))


def another_world(comm, name):
    with pytest.raises(ValueError, match="has 2 ranks where comm has 1"):
        build_strategy(name, _setup(LocalCommunicator()))


@pytest.mark.parametrize("name", ["zero1-torch", "fsdp2"])
def test_a_communicator_of_another_world_is_refused(name, gloo_ranks):
    """`another_world` asserts it."""
    gloo_ranks(2).run(another_world, name)


def refused_by_name(comm):
    with pytest.raises(ValueError, match="zero1-torch: LBFGS needs all parameters at once"):
        build_strategy("zero1-torch", _setup(comm, optimizer_cls=torch.optim.LBFGS))
    model = _net()
    model.first.weight = nn.Parameter(torch.empty(5, 5, device="meta"))
    with pytest.raises(ValueError, match="some parameters are on the meta device"):
        build_strategy("fsdp2", _setup(comm, model))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(ValueError, match="a buffer is on the meta device"):
        build_strategy("fsdp2", _setup(comm, model, init=_ones_by_name))
    model.count = None
    with pytest.raises(ValueError, match="init: the model has parameters on the meta device"):
        build_strategy("fsdp2", _setup(comm, model))
    with pytest.raises(ValueError, match="zero1-torch keeps unsharded weights on each rank"):
        build_strategy("zero1-torch", _setup(comm, model))


def test_what_cannot_be_done_is_refused_with_the_reason(gloo_ranks):
    """`refused_by_name` asserts it."""
    gloo_ranks(1).run(refused_by_name)


def wrong_shape(comm, path):
    model = _net()
    model.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    other = build_strategy("fsdp2", _setup(comm, model))
    with pytest.raises(ValueError, match=r"frozen: saved with shape \(3,\), the model's is \(4,\)"):
        checkpoint.load(path, other)


@pytest.mark.redundant
def test_loading_another_model_names_the_tensor(gloo_ranks, tmp_path: Path):
    """`saved` asserts it."""
    gloo_ranks(2).run(saved, "fsdp2", tmp_path / "c")
    gloo_ranks(2).run(wrong_shape, tmp_path / "c")
