import threading
import time

from zeroshard.train import watchdog
from zeroshard.train.watchdog import Watchdog


class Heard:
    def __init__(self):
        self.lines = []
        self.event = threading.Event()

    def __call__(self, line, speak):
        self.lines.append((line, speak))
        self.event.set()


def test_a_step_that_takes_too_long_leaves_its_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.1)
    heard = Heard()
    with Watchdog(tmp_path, 2, 0.2, heard) as watch:
        watch.alive()
        assert heard.event.wait(20)
    assert heard.lines[0][1] is False
    assert f"where each rank stands is in {tmp_path / 'stacks'}; " in heard.lines[0][0]
    stacks = (tmp_path / "stacks" / "rank-00002.txt").read_text()
    assert "test_a_step_that_takes_too_long" in stacks
    assert "in _watch" in stacks


def test_steps_in_time_leave_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.0)
    heard = Heard()
    with Watchdog(tmp_path, 0, 1.0, heard) as watch:
        for _ in range(12):
            time.sleep(0.1)
            watch.alive()
    assert not heard.lines
    assert not list((tmp_path / "stacks").iterdir())


def test_the_first_step_may_compile_and_zero_watches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.0)
    heard = Heard()
    with Watchdog(tmp_path, 0, 0.05, heard):
        time.sleep(0.3)
    with Watchdog(tmp_path, 0, 0.0, heard) as watch:
        watch.alive()
        time.sleep(0.1)
    assert not heard.lines
