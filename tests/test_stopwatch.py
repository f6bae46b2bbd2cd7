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
