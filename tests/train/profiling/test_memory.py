import pytest
import torch
from torch import nn

from zeroshard.comm import NullCommunicator
from zeroshard.train.profiling.memory import CATEGORIES, AllocationRecorder, in_order
from zeroshard.zero import STAGES, Zero


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


def _engine(stage, world_size=4, precision=None, **kwargs):
    net = _net()
    zero = Zero(net, stage, units=list(net), comm=NullCommunicator(world_size), precision=precision, **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-3)


def test_categories_come_in_their_order():
    assert list(in_order({"activations": 1, "params": 2, "grads": 0, "mystery": 3})) == [
        "params",
        "activations",
        "mystery",
    ]
    assert len(set(CATEGORIES)) == len(CATEGORIES)


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
    # When the step is over, all that is left is what the engine holds, the input, and the NaN that each unit's freed
    # weights read as.
    placeholders = 4 * sum(bool(unit.groups) for unit in zero.units) if stage == 3 else 0
    assert recorder.live_bytes == sum(zero.memory_bytes().values()) + x.nbytes + placeholders
