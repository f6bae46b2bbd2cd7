"""Changing the stage between steps changes no bit of what comes after, and leaves what that stage would have held."""

import pytest
import torch
from torch import nn

from exactness import same_bits
from nets import Net, muon_and_adamw, rows
from soak import soaking
from zeroshard.comm import run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.core.layout import FlatLayout

EVERY_CHANGE = [0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0]
# With states from the start, of the same shape, of one number, of rows and columns, of whole tensors.
CLASSES = ("SGD", "ASGD", "Adagrad", "NAdam", "Adafactor", "Muon")
BF16 = MixedPrecision(param_dtype=torch.bfloat16)


class Odd(nn.Module):
    """A tied weight, a frozen one, one that is never used, one element alone, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.blocks[2].weight = self.net.blocks[0].weight
        self.net.blocks[1].bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("counts", torch.arange(3))

    def forward(self, x):
        return self.net(x) * self.scale


def _optimizers(zero, name):
    if name == "Muon":
        return muon_and_adamw(zero)
    return [zero.optimizer(getattr(torch.optim, name), lr=1e-2, **({"momentum": 0.9} if name == "SGD" else {}))]


def _train(comm, path, name="AdamW", model=Odd, ema=False, **kwargs):
    """A step at each stage of ``path``: losses, norms, weights, pieces of state by place, bytes at the end."""
    zero = Zero(model(), stage=path[0], comm=comm, **kwargs)
    optimizers = _optimizers(zero, name)
    average = zero.ema(0.9) if ema else None
    schedulers = [torch.optim.lr_scheduler.StepLR(optim, 1, 0.9) for optim in optimizers]
    seen = []
    for step, stage in enumerate(path):
        if zero.strategy != STAGES[stage]:
            zero.restage(stage)
        loss = zero.model(rows(comm.rank, step)).float().square().mean()
        loss.backward()
        norm = zero.clip_grad_norm_(0.1)
        for optim, scheduler in zip(optimizers, schedulers, strict=True):
            optim.step()
            scheduler.step()
        if average is not None:
            average.update()
        held = zero.memory_bytes()
        zero.zero_grad()
        seen.append((loss.item(), norm.item()))
    state = [(s.name, s.kind, s.interval, s.tensor.clone()) for s in zero.named_shards()]
    return seen, zero.state_dict(), state, held


def _assert_goes_on(path, world_size=2, **kwargs):
    """A run that changes its stage as in ``path`` has the bits of one that is at the last stage throughout."""
    changed = run_threads(lambda comm: _train(comm, path, **kwargs), world_size)
    fixed = run_threads(lambda comm: _train(comm, path[-1:] * len(path), **kwargs), world_size)
    for one, other in zip(changed, fixed, strict=True):
        assert same_bits(one, other)


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_run_that_changes_its_stage_goes_on_in_the_same_bits(world_size):
    _assert_goes_on(EVERY_CHANGE, world_size, ema=True)


@pytest.mark.redundant
@pytest.mark.parametrize(("name", "world_size"), [*((name, 3) for name in CLASSES), ("Muon", 6)])
def test_whatever_optimizer_there_is(name, world_size):
    """On six ranks few of them own whole tensors."""
    _assert_goes_on([3, 0, 2, 1, 0, 3] if soaking() else [3, 0, 2, 3], world_size, name=name, model=Net)


@pytest.mark.redundant
@pytest.mark.parametrize(
    ("path", "precision"),
    [([0, 3, 1, 2], BF16), ([3, 0], BF16), ([3, 1, 2], MixedPrecision(gather="int8", reduce="int8", block=16))],
)
def test_masters_of_another_dtype_than_the_weights_move_too(path, precision):
    _assert_goes_on(path, precision=precision)


@pytest.mark.redundant
@pytest.mark.parametrize("shard_size", [1, 2])
def test_replicas_of_shards_move_alike(shard_size):
    _assert_goes_on([1, 3, 2], 4, shard_size=shard_size)


def test_a_stage_may_be_changed_before_the_first_step_and_the_model_is_given_back_whole():
    def rank_main(comm):
        model = Net()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        zero = Zero(model, stage=0, comm=comm)
        zero.restage(3)
        optim = zero.optimizer(torch.optim.AdamW, lr=0.0, weight_decay=0.0)
        zero.restage(1)
        model(rows(comm.rank)).sum().backward()
        optim.step()
        optim.zero_grad()
        zero.restage(3)
        zero.remove()
        return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())

    assert all(run_threads(rank_main, 2))


def test_accumulation_follows_the_new_row_unless_it_was_set():
    def rank_main(comm):
        zero = Zero(Net(), stage=1, comm=comm)
        assert zero.accumulate == "local"
        zero.restage(2)
        assert zero.accumulate == "sharded"
        assert zero.strategy == STAGES[2]
        zero.remove()
        zero = Zero(zero.model, stage=1, comm=comm, accumulate="local")
        zero.restage(2)
        assert zero.accumulate == "local"

    run_threads(rank_main, 2)


def test_where_something_would_be_lost_it_is_refused():
    def rank_main(comm):
        zero = Zero(Net(), stage=2, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW)
        average = zero.ema()
        with zero.full_params(), pytest.raises(RuntimeError, match="call it outside full_params"):
            zero.restage(3)
        with average.weights(), pytest.raises(RuntimeError, match=r"leave ema\.weights"):
            zero.restage(3)
        zero.model(rows(comm.rank)).sum().backward()
        with pytest.raises(RuntimeError, match=r"restage: gradients of the step under way.*after zero_grad"):
            zero.restage(3)
        optim.zero_grad()
        with zero.no_sync():
            zero.model(rows(comm.rank)).sum().backward()
        with pytest.raises(RuntimeError, match="restage: gradients of the step under way"):
            zero.restage(3)
        zero.zero_grad()
        with pytest.raises(ValueError, match="stage"):
            zero.restage(4)
        zero.restage(3)
        with pytest.raises(ValueError, match="shard_size: stage 0"):
            Zero(Net(), stage=1, comm=comm, shard_size=1).restage(0)

    run_threads(rank_main, 2)


def test_a_backward_through_a_forward_from_before_is_refused():
    def rank_main(comm):
        zero = Zero(Net(), stage=2, comm=comm)
        loss = zero.model(rows(comm.rank)).sum()
        zero.restage(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(rank_main, 1)


def test_states_of_whole_parameters_are_cut_and_joined(monkeypatch):
    """As on a GPU, where a replicated optimizer sees whole parameters, which end where shards do not."""

    monkeypatch.setattr(FlatLayout, "updated_by_all", lambda layout, device: (*layout.pieces(0, layout.padded_numel),))
    for path in ([0, 2], [2, 0], [3, 0, 3]):
        _assert_goes_on(path, 3, name="RAdam", ema=True)


@pytest.mark.redundant
@pytest.mark.parametrize("where", [0, 1])
def test_a_state_that_cannot_be_sent_is_refused_before_anything_is_taken_apart(where):
    """On every rank, though one alone has it; and the run goes on as it was."""

    def go(comm, refused):
        zero = Zero(Net(), stage=3, comm=comm)
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-2)

        def step():
            zero.model(rows(comm.rank)).sum().backward()
            optim.step()
            optim.zero_grad()

        step()
        if refused:
            state = optim.state[zero.pieces(optim)[-1]]
            state.update({"note": {object()}} if comm.rank == where else {})
            with pytest.raises(ValueError, match=r"note/0: a object in an optimizer's state; keep tensors, numbers"):
                zero.restage(0)
            state.pop("note", None)
            assert zero.strategy == STAGES[3]
        step()
        zero.restage(0)
        step()
        return zero.state_dict()

    expected, found = run_threads(lambda comm: (go(comm, False), go(comm, True)), 2)[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
