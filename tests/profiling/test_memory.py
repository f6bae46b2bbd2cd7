from __future__ import annotations

import pytest
import torch
from torch import nn

from zeroshard.comm import NullCommunicator
from zeroshard.profiling.memory import (
    CATEGORIES,
    POINTS,
    AllocationRecorder,
    ThreePoints,
    held_bytes,
    in_order,
    reconciled,
)
from zeroshard.zero import STAGES, MixedPrecision, Zero

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def _engine(stage, world_size=4, precision=None, **kwargs):
    net = _net()
    zero = Zero(net, stage, units=list(net), comm=NullCommunicator(world_size), precision=precision, **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_between_steps_the_storages_hold_what_the_engine_counts(stage, world_size, precision):
    zero, optim = _engine(stage, world_size, precision)
    for _ in range(2):
        zero.model(torch.ones(2, 8)).sum().backward()
        for moment in (lambda: None, optim.step):
            moment()
            counted = {name: n for name, n in zero.memory_bytes().items() if n}
            assert held_bytes(zero.holdings()) == counted
        optim.zero_grad()


def test_whole_weights_are_unit_buffers_in_use_and_prefetched_before():
    zero, _ = _engine(3)
    shard = 4 * 18  # 72 elements over 4 ranks, in fp32
    seen = []
    zero.model[1][1].register_forward_hook(lambda *_: seen.append(held_bytes(zero.holdings())))
    zero.model(torch.ones(2, 8))
    # Unit 1 runs, 2 is on its way, 0 has been freed.
    assert seen == [{"params": 3 * shard, "unit_buffers": 4 * shard, "prefetch": 4 * shard}]


def test_whole_gradients_are_unit_buffers_until_they_are_reduced():
    zero, _ = _engine(2)
    whole = 4 * 72
    loss = zero.model(torch.ones(2, 8)).sum()
    seen = []
    zero.model[1][0].weight.register_hook(lambda _: seen.append(held_bytes(zero.holdings())))
    loss.backward()
    assert seen[0]["unit_buffers"] >= whole
    assert held_bytes(zero.holdings()) == {"params": 3 * whole, "grads": 3 * whole // 4}


def test_storages_that_are_shared_count_once_and_empty_ones_never():
    whole = torch.zeros(10)
    assert held_bytes([("params", "a", whole), ("grads", "a", whole[2:]), ("ema", "", torch.empty(0))]) == {
        "params": 40
    }


def test_categories_come_in_their_order():
    assert list(in_order({"activations": 1, "params": 2, "grads": 0, "mystery": 3})) == [
        "params",
        "activations",
        "mystery",
    ]
    assert len(set(CATEGORIES)) == len(CATEGORIES)


def test_what_nobody_claims_is_what_the_allocator_has_beyond_the_categories():
    stats = {
        "requested_bytes.all.current": 1000,
        "allocated_bytes.all.current": 1536,
        "reserved_bytes.all.current": 4096,
    }
    found = reconciled({"params": 600, "grads": 300}, stats)
    assert (found.unclaimed, found.rounding, found.cached) == (100, 536, 2560)


@pytest.mark.parametrize("stage", STAGES)
def test_the_three_points_show_weights_then_gradients_then_states(stage):
    zero, optim = _engine(stage)
    points = ThreePoints(optim, lambda: held_bytes(zero.holdings()))
    for _ in range(2):
        zero.model(torch.ones(2, 8)).sum().backward()
        optim.step()
        optim.zero_grad()
    assert tuple(points.bytes) == POINTS
    assert set(points.bytes["initialised"]) == {"params"}
    assert set(points.bytes["before_step"]) == {"params", "grads"}
    assert set(points.bytes["after_step"]) == {"params", "grads", "optimizer"}
    assert not optim._optimizer_step_pre_hooks.keys() & {h.id for h in points._handles}


# -- the recorder -----------------------------------------------------------------------------------------------


def test_the_peak_counts_what_is_alive_at_once():
    recorder = AllocationRecorder()
    with recorder:
        a = torch.zeros(100)
        b = a + 1
        del a
        c = torch.zeros(50)
    assert recorder.peak.num_bytes == 800
    assert recorder.live_bytes == 600
    del b, c
    assert recorder.live_bytes == 0


def test_views_and_updates_in_place_take_no_memory():
    recorder = AllocationRecorder()
    with recorder:
        a = torch.zeros(100)
        a.view(10, 10).t().add_(1)
    assert recorder.peak.num_bytes == 400


def test_what_was_there_before_counts_once_an_operation_reads_it():
    before, untouched = torch.zeros(100), torch.zeros(100)
    recorder = AllocationRecorder()
    with recorder:
        kept = before * 2
    assert recorder.peak.by_category == {"temporaries": 400, "others": 400}
    del kept, untouched


def test_activations_are_what_forward_leaves_for_backward():
    first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
    net = nn.Sequential(first, nn.Sigmoid(), second, nn.Sigmoid())
    optim = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.ones(32, 8)
    recorder = AllocationRecorder(lambda: [("params", "", p) for p in net.parameters()]).follow(net, optim)
    with recorder:
        net(x).sum().backward()
        optim.step()
    peak = recorder.peak
    rows, weight = 4 * 32 * 8, 4 * 64
    # In the second layer's backward: the first sigmoid's output is kept, the second's is gone; the gradients of the
    # layer's output, of its weight and of its input are there.
    assert peak.by_category == {
        "params": 2 * weight,
        "activations": rows,
        "temporaries": 2 * rows + weight + 8,  # the loss and its gradient
        "others": rows,
    }
    assert peak.num_bytes == sum(peak.by_category.values())
    assert peak.phase == "backward"
    recorder.remove()
    assert not net._forward_hooks


@pytest.mark.parametrize("stage", STAGES)
def test_an_engines_buffers_are_followed_though_no_operation_resizes_them(stage):
    zero, optim = _engine(stage)
    x = torch.ones(2, 8)

    def step():
        zero.model(x).sum().backward()
        optim.step()
        optim.zero_grad()

    step()
    recorder = AllocationRecorder(zero.holdings).follow(zero.model, optim)
    with recorder:
        step()
    held = {name: n for name, n in recorder.peak.by_category.items() if name in ("params", "grads", "optimizer")}
    assert (stage >= 2) == ("unit_buffers" in recorder.peak.by_category or "prefetch" in recorder.peak.by_category)
    assert held["params"] == zero.memory_bytes()["params"]
    assert held["optimizer"] == zero.memory_bytes()["optimizer"]
    # When the step is over, all that is left is what the engine holds, and the input.
    assert recorder.live_bytes == sum(held_bytes(zero.holdings()).values()) + x.nbytes
