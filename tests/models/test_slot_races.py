"""Inputs on their way to the host and back: ordered by streams and events for any number of blocks, and races are seen.

The device is that of `hazards`, over CPU tensors: slots of the host are memory that lanes read and write as well.
"""

from collections import deque
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import nn

from hazards import Hazard, HazardDevice, on_device
from zeroshard.comm import streams
from zeroshard.models import inputs_on_host, offload_inputs
from zeroshard.models.inputs_on_host import BlockInput, Slots

SHAPE = (2, 4, 8)


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()


def _train(monkeypatch, num_blocks, num_forwards=1, *, evaluates=False):
    """Two steps of ``num_forwards`` forwards, then their backwards; gradients, and the lanes that copied."""
    device = HazardDevice()
    on_device(monkeypatch, device)
    monkeypatch.setattr(inputs_on_host, "_slots", None)  # none that an exception's frames may keep
    torch.manual_seed(0)
    blocks = nn.Sequential(*(_Block() for _ in range(num_blocks)))
    plain = nn.Sequential(*(_Block() for _ in range(num_blocks)))
    plain.load_state_dict(blocks.state_dict())
    offload_inputs(*blocks)
    inputs = [torch.randn(SHAPE) for _ in range(num_forwards)]
    with device:
        for _ in range(2):
            losses = []
            for x in inputs:
                losses.append(blocks(x.sin().requires_grad_()).square().sum())
                if evaluates:
                    with torch.no_grad():
                        blocks(x)
            for loss in losses:
                loss.backward()
            del loss, losses
    for _ in range(2):
        sum(plain(x.sin()).square().sum() for x in inputs).backward()
    for ours, theirs in zip(blocks.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    return {name for name, stream in device._streams.items() if stream.clock[name]}


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("num_blocks", range(1, 9))
def test_no_input_is_touched_before_what_it_must_wait_for(num_blocks, num_forwards, evaluates, monkeypatch):
    lanes = _train(monkeypatch, num_blocks, num_forwards, evaluates=evaluates)
    if num_blocks * num_forwards > 2:
        assert len(lanes - {"host"}) == 3  # one computes, one copies down, one copies up


class _Careless:
    """Streams on which nobody waits for what one method waits for."""

    def __init__(self, streams, *, waits=True, without=None):
        self._streams, self._waits, self._without = streams, waits, without

    def __getattr__(self, name):
        return getattr(self._streams, name)

    def wait(self, mark):
        if self._waits:
            self._streams.wait(mark)

    @contextmanager
    def on(self, lane, *after):
        after = tuple(mark for place, mark in enumerate(after) if place != self._without)
        with self._streams.on(lane, *after):
            yield


PLANTED = {
    "an input leaves before it is computed": ("copy_down", {"without": 0}),
    "an input is freed while it is copied down": ("leave", {"waits": False}),
    "an input comes back into memory that is still used": ("fetch", {"without": 0}),
    "an input is read before it has come back": ("value", {"waits": False}),
    "the input of the last block but one is freed on its way": ("_wait_for_copy", {"waits": False}),
}


def _plant(monkeypatch, name, **careless):
    method = getattr(BlockInput, name)

    def planted(self):
        before, self._streams = self._streams, _Careless(self._streams, **careless)
        try:
            return method(self)
        finally:
            self._streams = before

    monkeypatch.setattr(BlockInput, name, planted)


@pytest.mark.redundant
@pytest.mark.parametrize("what", PLANTED)
def test_each_mark_that_is_not_waited_for_is_seen(what, monkeypatch):
    name, careless = PLANTED[what]
    _plant(monkeypatch, name, **careless)
    with pytest.raises(Hazard, match=r"does not wait for|that others still used"):
        _train(monkeypatch, 5, 2)


def _slots_of_two_devices(monkeypatch):
    """A slot that one device has used goes to another one, whose streams know of the first by the slot's mark alone."""
    monkeypatch.setattr(inputs_on_host, "_slots", None)
    device = HazardDevice()
    devices = [streams.DeviceStreams(torch.device("cpu"), device) for _ in range(2)]
    turns = [device.compute, device.new_stream("compute of the other")]
    models = [nn.Sequential(*(_Block() for _ in range(4))) for _ in turns]
    for each in models:
        offload_inputs(*each)
    with device:
        for model, stream, made in zip(models, turns, devices, strict=True):
            monkeypatch.setattr(streams.ByDevice, "__getitem__", lambda self, key, made=made: made)
            with device.stream(stream):
                model(torch.randn(SHAPE)).sum().backward()


def test_a_slot_that_another_device_has_used_is_written_after_that(monkeypatch):
    """`_slots_of_two_devices` raises `Hazard` if not."""
    _slots_of_two_devices(monkeypatch)


def test_a_slot_that_is_written_without_waiting_for_the_other_device_is_seen(monkeypatch):
    _plant(monkeypatch, "copy_down", without=1)
    with pytest.raises(Hazard, match="does not wait for"):
        _slots_of_two_devices(monkeypatch)


def test_a_slot_that_is_given_back_without_its_mark_is_seen(monkeypatch):
    take = Slots.take

    def without_marks(self, *args):
        self.returned = deque((slot, None, x) for slot, _, x in self.returned)
        return take(self, *args)

    monkeypatch.setattr(Slots, "take", without_marks)
    with pytest.raises(Hazard, match="does not wait for"):
        _slots_of_two_devices(monkeypatch)


class _Failing(_Block):
    def forward(self, x):
        y = super().forward(x)
        y.register_hook(lambda grad: 1 / 0)
        return y


def _lose(monkeypatch, kind):
    """Inputs that are gone while they are copied down, as nobody runs their backward, or up, as it fails on the way."""
    device = HazardDevice()
    on_device(monkeypatch, device)
    monkeypatch.setattr(inputs_on_host, "_slots", None)
    blocks = nn.Sequential(_Block(), _Block(), kind(), _Block(), _Block())
    offload_inputs(*blocks)
    with device:
        for _ in range(3):
            loss = blocks(torch.randn(SHAPE).requires_grad_()).square().sum()
            if kind is _Failing:
                with suppress(ZeroDivisionError):
                    loss.backward()
            del loss


@pytest.mark.parametrize("kind", [_Block, _Failing])
def test_an_input_that_is_lost_while_it_is_copied_stays_until_that_is_over(kind, monkeypatch):
    _lose(monkeypatch, kind)
    end = BlockInput.__del__

    def frees_at_once(self):
        self._is_copying = False
        end(self)

    monkeypatch.setattr(BlockInput, "__del__", frees_at_once)
    with pytest.raises(Hazard, match="that others still used"):
        _lose(monkeypatch, kind)
