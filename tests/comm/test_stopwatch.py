import pytest
import torch

from zeroshard.comm.wrappers import stopwatch
from zeroshard.comm.wrappers.stopwatch import Stopwatch


def test_spans_of_one_name_add_up_and_are_taken_once(monkeypatch):
    ticks = iter([0.0, 1.0, 10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(ticks))
    spans = Stopwatch("cpu")
    for name in ("forward", "backward", "forward"):
        with spans.span(name):
            pass
    assert spans.take_seconds() == {"forward": 2.0, "backward": 2.5}
    assert spans.take_seconds() == {}


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
