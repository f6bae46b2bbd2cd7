"""Gradients that are computed in the engine's buffer: the bits of those that are copied, whatever a model does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from nets import NOTHING_RANDOM
from zeroshard import kernels
from zeroshard.comm import run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.buffers import local_grads
from zeroshard.zero.buffers.local_grads import LocalGrads
from zeroshard.zero.streams import DeviceStreams, NoStreams

WIDTH, NUM_STEPS = 16, 3


@pytest.fixture(autouse=True)
def _small_gradients_have_places(monkeypatch):
    monkeypatch.setattr(local_grads, "SMALL_NUMEL", 0)


@pytest.fixture
def counted(monkeypatch):
    """How many gradients were computed in place, and how many were added to those past autograd."""
    counts = {"in place": 0, "added": 0}
    arrives, takes = LocalGrads.arrives, LocalGrads.was_placed

    def count_in_place(self, slot):
        counts["in place"] += 1
        arrives(self, slot)

    def count_added(self, slot):
        found = takes(self, slot)
        counts["added"] += found
        return found

    monkeypatch.setattr(LocalGrads, "arrives", count_in_place)
    monkeypatch.setattr(LocalGrads, "was_placed", count_added)
    return counts


class Model(nn.Module):
    """Three square layers of ``kind``; ``path`` computes the output."""

    def __init__(self, kind, path) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind(WIDTH, WIDTH) for _ in range(3))
        self.path = path
        for index, param in enumerate(self.parameters()):
            param.data.copy_(torch.randn(param.shape, generator=torch.Generator().manual_seed(index)) * 0.4)

    def forward(self, x):
        return self.path(self.layers, x).square().mean()


def in_order(layers, x):
    for layer in layers:
        x = layer(x).tanh()
    return x


def twice(layers, x):
    return in_order(layers, in_order(layers, x))


def three_times(layers, x):
    return in_order(layers, twice(layers, x))


def also_outside(layers, x):
    """The first layer's weight is used once more, outside of its module, before it: its gradient comes late."""
    return in_order(layers, F.linear(x, layers[0].weight.clone()))


def inside_and_outside_of_a_checkpoint(layers, x, *, use_reentrant):
    """A reentrant one has a backward of its own, in the middle of that which adds up the other two gradients."""
    before = layers[1](x).tanh()
    inside = checkpoint(partial(in_order, layers), before, use_reentrant=use_reentrant, **NOTHING_RANDOM)
    return layers[1](inside)


def recomputed(layers, x):
    return checkpoint(partial(in_order, layers), x, use_reentrant=False, **NOTHING_RANDOM)


PATHS = {
    "in order": in_order,
    "twice": twice,
    "three times": three_times,
    "also outside": also_outside,
    "recomputed": recomputed,
    "in and out of a checkpoint": partial(inside_and_outside_of_a_checkpoint, use_reentrant=False),
    "in and out of a reentrant checkpoint": partial(inside_and_outside_of_a_checkpoint, use_reentrant=True),
}


def _plain_turn(model, x, zero):
    model(x).backward()


def _two_micro_batches(model, x, zero):
    with zero.no_sync():
        model(x).backward()
    model(x + 1).backward()


def _two_reduced(model, x, zero):
    model(x).backward()
    model(x + 1).backward()


def _retained(model, x, zero):
    loss = model(x)
    loss.backward(retain_graph=True)
    loss.backward()


def _only_grad_first(model, x, zero):
    """`torch.autograd.grad` of another engine-free function first, then a backward."""
    torch.autograd.grad(model(x), [x])
    model(x).backward()


def _fails_once(model, x, zero):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, g):
            raise ArithmeticError

    first = model.layers[0]
    handle = first.register_forward_hook(lambda module, args, y: Fails.apply(y))
    with pytest.raises(ArithmeticError):
        model(x).backward()
    handle.remove()
    zero.zero_grad()
    model(x).backward()


TURNS = [_plain_turn, _two_micro_batches, _two_reduced, _retained, _only_grad_first, _fails_once]


def _rank(comm, kind, path, stage, turn, precision, *, by_layer=True):
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(comm.rank)).requires_grad_()
    model = Model(kind, path)
    units = list(model.layers) if by_layer else []
    zero = Zero(model, stage=stage, units=units, comm=comm, precision=precision)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=0.05)
    grads = []
    for _ in range(NUM_STEPS):
        turn(model, x, zero)
        grads.append([param.grad.full_tensor() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return grads


def _both(path, stage, turn, world_size=2, precision=None, **how):
    """What every rank has computed with our layers, and with torch's."""
    run = partial(_rank, path=path, stage=stage, turn=turn, precision=precision or MixedPrecision(), **how)
    ours = run_threads(lambda comm: run(comm, kernels.Linear), world_size)
    theirs = run_threads(lambda comm: run(comm, nn.Linear), world_size)
    return ours, theirs


REORDERED = {  # where gradients of one weight are added in another order than autograd's
    "also outside",  # each use's gradient is reduced by itself, because the unit is reduced between the two
    "in and out of a reentrant checkpoint",  # inside it comes before those outside; autograd adds it last
}


def _assert_same_bits(path, stage, turn, **how):
    ours, theirs = _both(path, stage, turn, **how)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("path", "stage"),
    [(path, stage) for path in PATHS for stage in STAGES if (path, stage) != ("also outside", 3)],  # reads NaN there
)
def test_bits_are_those_of_copied_gradients(path, stage):
    ours, theirs = _both(PATHS[path], stage, _plain_turn)
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if path in REORDERED else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("path", sorted(REORDERED))
def test_every_stage_adds_them_in_the_same_order(path):
    stages = [stage for stage in STAGES if (path, stage) != ("also outside", 3)]
    first, *others = (_both(PATHS[path], stage, _plain_turn)[0] for stage in stages)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.parametrize("turn", TURNS[1:], ids=lambda fn: fn.__name__.strip("_"))
@pytest.mark.parametrize("stage", STAGES)
def test_in_every_order_of_backwards(turn, stage):
    _assert_same_bits(in_order, stage, turn)


@pytest.mark.parametrize("turn", TURNS[1:], ids=lambda fn: fn.__name__.strip("_"))
def test_of_a_weight_that_is_used_twice_in_every_order_of_backwards(turn):
    ours, theirs = _both(twice, 1, turn)
    # a second backward through one graph reduces the unit between the two uses, as in `REORDERED`
    tolerance = {"rtol": 1e-4, "atol": 1e-6} if turn is _retained else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize("stage", STAGES)
def test_each_first_gradient_is_computed_in_place(stage, counted):
    _both(in_order, stage, _plain_turn)
    assert counted == {"in place": 2 * 3 * NUM_STEPS, "added": 0}  # ranks, layers, steps


def test_later_gradients_are_added(counted):
    _both(in_order, 1, _two_micro_batches)
    assert counted == {"in place": 2 * 3 * NUM_STEPS, "added": 0}


def test_gradients_after_a_reduction_are_computed_in_place_too(counted):
    _both(in_order, 1, _two_reduced)
    assert counted == {"in place": 2 * 2 * 3 * NUM_STEPS, "added": 0}


def test_later_gradients_of_a_weight_are_added_to_the_first_one(counted):
    _assert_same_bits(three_times, 1, _plain_turn)
    assert counted == {"in place": 2 * 3 * NUM_STEPS, "added": 2 * 2 * 3 * NUM_STEPS}


@pytest.mark.parametrize(
    ("world_size", "precision"),
    [
        (3, MixedPrecision()),  # a third is no power of two
        (2, MixedPrecision(param_dtype=torch.bfloat16)),  # gradients are widened
        (2, MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)),
    ],
    ids=["three ranks", "wider buffer", "float16"],
)
def test_where_bits_could_differ_gradients_are_copied(world_size, precision, counted):
    _assert_same_bits(in_order, 2, _plain_turn, world_size=world_size, precision=precision)
    assert counted == {"in place": 0, "added": 0}


@pytest.mark.parametrize("stage", STAGES)
def test_narrow_gradients_are_computed_in_place_too(stage, counted):
    narrow = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    _assert_same_bits(in_order, stage, _plain_turn, precision=narrow)
    assert counted["in place"] == 2 * 3 * NUM_STEPS


def test_a_place_that_begins_elsewhere_than_a_tensor_would_is_not_given(monkeypatch, counted):
    monkeypatch.setitem(globals(), "WIDTH", 17)
    _assert_same_bits(in_order, 2, _plain_turn, by_layer=False)
    assert counted == {"in place": 2 * 2 * NUM_STEPS, "added": 0}  # two of three layers begin at a multiple


@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_a_hook_keeps_stays_as_it_was(stage):
    def rank(comm):
        model = Model(kernels.Linear, in_order)
        zero = Zero(model, stage=stage, units=list(model.layers), comm=comm)
        kept, copies = [], []
        model.layers[1].weight.register_hook(lambda g: (kept.append(g), copies.append(g.clone()))[0])
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(2):
            model(torch.ones(4, WIDTH) * (step + comm.rank + 1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return kept, copies

    for kept, copies in run_threads(rank, 2):
        assert len(kept) == 2
        torch.testing.assert_close(kept, copies, rtol=0, atol=0)


def _post_accumulate(model, keep):
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda param: keep(param.grad))


def _on_the_module(model, keep):
    model.layers[1].register_forward_hook(lambda module, args, y: _on_the_node(y.grad_fn, keep))


def _on_the_node(node, keep):
    def hook(grad_inputs, grad_outputs):
        for grad in grad_inputs:
            if grad is not None and grad.shape == (WIDTH, WIDTH):
                keep(grad.detach())

    node.register_hook(hook)


def _before_accumulation(model, keep):
    weight = model.layers[1].weight
    node = weight.view_as(weight).grad_fn.next_functions[0][0]
    node.register_prehook(lambda grads: keep(grads[0].detach()))
    model.node = node  # autograd keeps it only while somebody does


@pytest.mark.parametrize(
    "kept_by", [_post_accumulate, _on_the_module, _before_accumulation], ids=lambda fn: fn.__name__
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_that_any_hook_keeps_is_this_ranks_own(stage, kept_by):
    def rank(comm):
        x = torch.full((4, WIDTH), comm.rank + 1.0)
        alone = Model(kernels.Linear, in_order)
        alone(x).backward()
        model, kept = Model(kernels.Linear, in_order), []
        kept_by(model, kept.append)
        zero = Zero(model, stage=stage, units=list(model.layers), comm=comm)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
        model(x * 2).backward()
        return [torch.as_tensor(kept[0]) + 0], alone.layers[1].weight.grad

    for (kept,), own in run_threads(rank, 2):
        torch.testing.assert_close(kept, own, rtol=0, atol=0)


def test_on_another_stream_than_the_engines_gradients_are_copied(monkeypatch, counted):
    monkeypatch.setattr(NoStreams, "is_home", lambda self: False)
    _assert_same_bits(in_order, 2, _plain_turn)
    assert counted == {"in place": 0, "added": 0}


def test_the_engines_stream_is_the_one_that_it_was_made_on():
    class Api:
        now = "first"

        def current_stream(self, device):
            return self.now

    api = Api()
    streams = DeviceStreams(torch.device("cuda", 0), api)
    assert streams.is_home()
    api.now = "second"
    assert not streams.is_home()


def test_a_removed_engine_offers_no_place():
    model = Model(kernels.Linear, in_order)
    zero = Zero(model, stage=1)
    zero.remove()
    model(torch.ones(4, WIDTH)).backward()
    assert model.layers[0](torch.ones(1, WIDTH)).grad_fn.name() == "AddmmBackward0"
