"""How long a step waits for the host's updates: the real schedule on a clock, against the planner's formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fake_cuda import CUDA, Peers, backward_events, device, guarded, reads  # noqa: F401 -- fixtures
from nets import WIDTH
from virtual_time import VirtualTime
from zero.offload.test_on_a_gpu import Pages
from zeroshard.comm import streams
from zeroshard.lab.predict.offload import UnitTimes, exposed_s, hidden_units
from zeroshard.zero import STAGES, MixedPrecision, Offload, Zero
from zeroshard.zero.offload import host_grads, host_params, placement, staging

NUM_STEPS = 3
FAST = 1e15  # bytes/s of a bus
NO_TIME = 1e-9  # what its copies take, and how far sums of seconds round


def exposed(monkeypatch, stage, forward, updates, *, fraction=1.0, prefetch=1, bus=FAST, weights="device"):
    """Seconds that forwards of the last steps take beyond the sum of ``forward``, of each of which there is a unit.

    ``forward``, ``updates``: seconds by unit in the order of the forward; a backward takes twice its forward.
    """
    time = VirtualTime(bus)
    made = streams.DeviceStreams(CUDA, time)
    monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key: made)
    monkeypatch.setattr(host_params, "is_set", lambda flag: False)
    for module in (host_grads, host_params, staging):
        monkeypatch.setattr(module, "Slab", Pages)
    of_unit = {}
    executor, update = time.executor()
    run = placement._update
    monkeypatch.setattr(
        placement, "_update", lambda twin, step, *rest: run(twin, time.updating(step, of_unit.__getitem__), *rest)
    )
    monkeypatch.setattr(placement, "Executor", executor)
    monkeypatch.setattr(placement, "Update", update)
    with FakeTensorMode(), time:
        with CUDA:
            model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in forward])
        offload = Offload(fraction=fraction, weights=weights)
        how = {"precision": MixedPrecision(torch.bfloat16), "offload": offload, "prefetch": prefetch}
        zero = Zero(model, stage, units=list(model)[1:], comm=Peers(4, time_device(time)), **how)
        for unit, seconds in zip(zero.units, updates, strict=True):
            of_unit.update({group.params.name: seconds for group in unit.groups})
        for layer, seconds in zip(model, forward, strict=True):
            _takes(layer, time, seconds)
        _backwards(zero, time, [2 * seconds for seconds in forward])
        optim = zero.optimizer(torch.optim.AdamW, lr=1e-3)
        waited = []
        for _ in range(NUM_STEPS):
            began = time.compute_stream.now
            model(torch.empty(2, WIDTH, device=CUDA))
            waited.append(time.compute_stream.now - began - sum(forward))
            backward_events(zero)
            zero.clip_grad_norm_(1.0)
            optim.step()
            optim.zero_grad()
    assert bus < FAST or waited[0] == pytest.approx(0, abs=NO_TIME)  # nothing has been updated yet
    assert waited[1] == pytest.approx(waited[2], abs=NO_TIME)
    return waited[-1]


class time_device:
    """What `Peers` asks of a device: the name of the stream on which a collective is issued."""

    def __init__(self, time):
        self._time = time

    @property
    def current(self):
        return self._time.current_stream()


def _takes(layer, time, seconds):
    inner = layer.forward

    def forward(x):
        time.compute(seconds)
        return inner(x)

    layer.forward = forward


def _backwards(zero, time, seconds):
    """Have the engine's units take these seconds in backward, the root's after all others'."""
    runtime = zero._runtime
    of = dict(zip(zero.units, seconds, strict=True))
    after = runtime.post_backward

    def post_backward(unit, forward):
        time.compute(of[unit])
        after(unit, forward)
        if unit is runtime.units[0]:
            time.compute(of[runtime.root])

    runtime.post_backward = post_backward


def formula(forward, updates):
    """max over k of (updates up to k - forward before k)."""
    before = itertools.accumulate(forward, initial=0.0)
    return max(done - ahead for done, ahead in zip(itertools.accumulate(updates), before, strict=False))


TIMES = {
    "a fast host": ([1.0] * 5, [0.5] * 5),
    "a slow host": ([1.0] * 5, [3.0] * 5),
    "an even one": ([1.0] * 5, [1.0] * 5),
    "a large unit in the middle": ([1.0, 1.0, 2.0, 1.0, 1.0], [0.5, 0.5, 6.0, 0.25, 0.25]),
    "a large head": ([0.5, 1.0, 1.0, 1.0, 1.0], [0.25, 0.5, 0.5, 0.5, 3.25]),
}


@pytest.mark.redundant
@pytest.mark.pairwise("stage", "weights")
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize(("stage", "weights"), [*((stage, "device") for stage in STAGES), (3, "host")])
@pytest.mark.parametrize("times", TIMES)
def test_a_step_waits_for_the_updates_that_the_forward_is_ahead_of_and_no_longer(
    times,
    stage,
    weights,
    prefetch,
    guarded,  # noqa: F811
    reads,  # noqa: F811
    monkeypatch,
):
    forward, updates = TIMES[times]
    found = exposed(monkeypatch, stage, forward, updates, prefetch=prefetch, weights=weights)
    assert found == pytest.approx(formula(forward, updates), abs=NO_TIME)
    assert found >= updates[0] - NO_TIME
    before = list(itertools.accumulate(forward, initial=0.0))
    units = [UnitTimes(at, 0.0, 0.0, update, 0.0) for at, update in zip(before, updates, strict=False)]
    assert found == pytest.approx(exposed_s(units), abs=NO_TIME)


@pytest.mark.redundant(but=["a fast host-0"])
@pytest.mark.pairwise("times")
@pytest.mark.parametrize("stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.soak) for stage in (1, 2))])
@pytest.mark.parametrize("times", TIMES)
def test_with_the_fraction_of_the_planner_no_step_waits(times, stage, guarded, reads, monkeypatch):  # noqa: F811
    forward, updates = TIMES[times]
    before = list(itertools.accumulate(forward, initial=0.0))
    units = [UnitTimes(at, 0.0, 0.0, update, 0.0) for at, update in zip(before, updates, strict=False)]
    num_units = hidden_units(units)
    assert 0 < num_units < len(units)  # the first is always waited for
    one_more = (num_units + 0.5) / len(units)
    found = exposed(monkeypatch, stage, forward, updates, fraction=num_units / len(units))
    assert found == pytest.approx(0, abs=NO_TIME)
    assert exposed(monkeypatch, stage, forward, updates, fraction=one_more) > NO_TIME


@pytest.mark.redundant
def test_copies_over_the_bus_are_waited_for_where_nothing_hides_them(guarded, reads, monkeypatch):  # noqa: F811
    """Gradients go down as backward goes on, all but the last of them; weights go up once they are updated."""
    forward, updates = [1.0] * 5, [0.25] * 5
    a_unit = WIDTH * (WIDTH + 1)  # elements of a unit; a rank has a quarter of them
    found = exposed(monkeypatch, 3, forward, updates, bus=a_unit)  # 4 bytes of a gradient: a second for a unit
    down, up = 1.0, 0.5
    assert updates[0] + down + up <= found <= updates[0] + 3 * down + up
