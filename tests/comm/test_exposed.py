"""Exposed communication: whose clock counts, where it was waited for, and that reading it waits for nobody."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from fake_time import Clock
from zeroshard.comm import CONTROL, Exposed, NullCommunicator, ObservedCommunicator, by_kind, labelled
from zeroshard.comm.labels import is_on_side_stream, on_side_stream
from zeroshard.comm.wrappers import observe, stopwatch

CPU = torch.device("cpu")


class Slow(NullCommunicator):
    """Takes a while to issue, and longer to finish."""

    def __init__(self, clock):
        super().__init__(2)
        self._clock = clock

    def all_gather(self, output, input):
        self._clock.sleep(0.01)
        return self

    all_reduce = all_gather

    def wait(self):
        self._clock.sleep(0.02)


@pytest.fixture
def observed(monkeypatch):
    clock = Clock()
    for module in (stopwatch, observe):
        monkeypatch.setattr(module, "time", clock)
    return ObservedCommunicator(Slow(clock))


def _gather(observed):
    with labelled("blocks.3/weights"):
        return observed.all_gather(torch.zeros(2), torch.zeros(1))


def test_on_the_cpu_issuing_and_waiting_both_stand_in_the_way(observed):
    work = _gather(observed)
    assert observed.exposed.take_seconds() == {"blocks.3/weights/forward": pytest.approx(0.01)}
    assert observed.exposed.take_seconds() == {}
    observed.drain()
    work.wait()  # its record is gone, its time is not lost
    assert observed.exposed.take_seconds() == {"blocks.3/weights/forward": pytest.approx(0.02)}


def test_a_record_has_the_times_of_issuing_and_of_waiting_apart(observed):
    work = _gather(observed)
    (record,) = observed.records
    assert (record.issue_s, record.wait_s) == (pytest.approx(0.01), 0.0)
    work.wait()
    assert (record.issue_s, record.wait_s) == (pytest.approx(0.01), pytest.approx(0.02))


def test_what_backward_waits_for_is_told_apart(observed):
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: _gather(observed).wait())
    y.sum().backward()
    assert observed.exposed.take_seconds() == {"blocks.3/weights/backward": pytest.approx(0.03)}


def test_control_messages_are_one_kind(observed):
    with labelled(CONTROL):
        observed.all_reduce(torch.zeros(1), "max").wait()
    assert list(observed.exposed.take_seconds()) == [CONTROL]


def test_kinds_are_sums_over_units():
    seconds = {"blocks.0/weights/forward": 1.0, "root/weights/forward": 2.0, "a.b/grads/backward": 4.0, CONTROL: 8.0}
    assert by_kind(seconds) == {"weights/forward": 3.0, "grads/backward": 4.0, CONTROL: 8.0}


class _Event:
    """A CUDA event as far as it is used here; the device has passed it where ``passed``."""

    made: ClassVar[list[_Event]] = []

    def __init__(self, enable_timing):
        assert enable_timing
        self.at_ms, self.passed = None, False
        _Event.made.append(self)

    def record(self):
        self.at_ms = 10.0 * _Event.made.index(self)

    def query(self):
        return self.passed

    def elapsed_time(self, end):
        assert self.passed
        assert end.passed
        return end.at_ms - self.at_ms


def test_on_cuda_the_stream_is_timed_and_events_not_reached_yet_wait_for_a_later_call(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "made", [])
    exposed, cuda = Exposed(), torch.device("cuda")
    with exposed.timed("a/weights", cuda, issuing=True):
        pass
    assert _Event.made == []
    for label in ("a/weights", "b/weights"):
        with exposed.timed(label, cuda):
            pass
    assert exposed.take_seconds() == {}
    for event in _Event.made[:2]:
        event.passed = True
    assert exposed.take_seconds() == {"a/weights/forward": pytest.approx(0.01)}
    for event in _Event.made:
        event.passed = True
    assert exposed.take_seconds() == {"b/weights/forward": pytest.approx(0.01)}
    assert exposed.take_seconds() == {}


def test_what_a_stream_beside_the_one_that_computes_waits_for_is_not_exposed(monkeypatch):
    exposed, made = Exposed(), []
    monkeypatch.setattr(torch.cuda, "Event", lambda **options: made.append(options) or Event())

    class Event:
        def record(self):
            """As CUDA's."""

    with on_side_stream(), exposed.timed("unit/grads", torch.device("cuda", 0)):
        assert is_on_side_stream()
    assert not made
    with exposed.timed("unit/grads", torch.device("cuda", 0)):
        assert not is_on_side_stream()
    assert len(made) == 2
