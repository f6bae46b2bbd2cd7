import time

import pytest
import torch

from zeroshard import stopwatch
from zeroshard.stopwatch import Stopwatch


def test_spans_of_one_name_add_up_and_are_taken_once(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
    spans = Stopwatch("cpu")
    for name in ("forward", "backward", "forward"):
        with spans.span(name):
            pass
    assert spans.take_seconds() == {"forward": 2.0, "backward": 2.5}
    assert spans.take_seconds() == {}


class _Event:
    """A device's event that the device passes when told to."""

    passed: float | None = None

    def __init__(self, enable_timing):
        assert enable_timing
        self.at = None

    def record(self):
        self.at = time.perf_counter()

    def query(self):
        return type(self).passed is not None and self.at <= type(self).passed

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


def test_what_the_device_has_not_passed_comes_with_a_later_take(monkeypatch):
    class Event(_Event):
        pass

    monkeypatch.setattr(torch.cuda, "Event", Event)
    spans = Stopwatch("cuda")
    with spans.span("forward"):
        pass
    Event.passed = time.perf_counter()
    with spans.span("backward"):
        pass
    assert set(spans.take_seconds()) == {"forward"}
    Event.passed = time.perf_counter()
    assert set(spans.take_seconds()) == {"backward"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_span_on_cuda_is_the_devices_time():
    spans = Stopwatch("cuda")
    x = torch.ones(4096, 4096, device="cuda")
    with spans.span("product"):
        for _ in range(10):
            x @ x
    torch.cuda.synchronize()
    assert spans.take_seconds()["product"] > 1e-4
