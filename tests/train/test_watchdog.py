import math
import threading
from types import SimpleNamespace

import pytest

from fake_time import Clock
from zeroshard.comm.base import PeerError
from zeroshard.train.loop import watchdog
from zeroshard.train.loop.watchdog import Watchdog


class Heard:
    def __init__(self):
        self.lines = []
        self.event = threading.Event()

    def __call__(self, line, speak):
        self.lines.append((line, speak))
        self.event.set()


def test_a_step_that_takes_too_long_leaves_its_stacks(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.2)
    heard = Heard()
    with Watchdog(tmp_path, 2, 0.2, heard) as watch:
        watch.alive()
        assert heard.event.wait(600)
    assert heard.lines[0][1] is False
    assert f"the stacks of each rank are in {tmp_path / 'stacks'}; " in heard.lines[0][0]
    stacks = (tmp_path / "stacks" / "rank-00002.txt").read_text()
    assert "test_a_step_that_takes_too_long" in stacks
    assert "in _watch" in stacks


def _lose_a_peer(tmp_path, clock, after_s):
    """What a watchdog of 5 s says where a collective fails so long after the last step."""
    heard = Heard()

    def train():
        with Watchdog(tmp_path, 2, 5.0, heard) as watch:
            watch.alive()
            clock.pass_by(after_s)
            raise PeerError("rank 0, or the launcher, is gone")

    with pytest.raises(PeerError, match="is gone"):
        train()
    return heard.lines


def test_a_rank_whose_peers_have_left_a_step_that_hangs_says_that_it_hung(tmp_path, clock):
    where = f"the stacks of each rank are in {tmp_path / 'stacks'}; start again with --resume auto"
    assert _lose_a_peer(tmp_path, clock, 5.5) == [(f"a step has taken 5 s (step_timeout_s): {where}", True)]


def test_a_rank_whose_peer_is_lost_within_a_step_says_what_it_was_told(tmp_path, clock):
    assert _lose_a_peer(tmp_path, clock, 4.5) == []


def test_ranks_give_each_other_time_to_write_their_stacks(tmp_path, monkeypatch):
    """By a clock that goes on whenever it is read: 5 s is the limit, and the last reading alone is beyond it."""
    readings = iter([104.9, 105.1, 105.0 + watchdog.TIME_TO_DUMP_S - 0.1, 105.0 + watchdog.TIME_TO_DUMP_S + 0.1])
    begun, left = threading.Event(), []

    def hear(line, speak):
        left.append(list(readings))
        heard(line, speak)

    heard = Heard()
    watch = Watchdog(tmp_path, 0, 5.0, hear)
    monkeypatch.setattr(watchdog, "LOOKS_PER_LIMIT", 5000)
    monkeypatch.setattr(
        watchdog, "time", SimpleNamespace(monotonic=lambda: next(readings) if begun.is_set() else 100.0)
    )
    with watch:
        watch.alive()
        begun.set()
        assert heard.event.wait(600)
    assert left == [[]]


class Watched(Clock):
    """A clock that tells when the watchdog has looked at it."""

    def __init__(self):
        super().__init__()
        self.looked = threading.Event()

    def monotonic(self):
        now = self.now
        if threading.current_thread().name == "watchdog":
            self.looked.set()
        return now

    def pass_by(self, seconds):
        """Let time pass, until the watchdog has seen that it has and has looked once more."""
        self.now += seconds
        for _ in range(2):
            self.looked.clear()
            assert self.looked.wait(600)


@pytest.fixture
def clock(monkeypatch):
    clock = Watched()
    monkeypatch.setattr(watchdog, "time", clock)
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 5.0)
    monkeypatch.setattr(watchdog, "LOOKS_PER_LIMIT", 100_000)  # one in a millisecond
    return clock


def test_steps_in_time_leave_nothing(tmp_path, clock):
    heard = Heard()
    with Watchdog(tmp_path, 0, 100.0, heard) as watch:
        for _ in range(12):
            watch.alive()
            clock.pass_by(99.0)
        assert not heard.lines
    assert not list((tmp_path / "stacks").iterdir())


def test_a_step_that_ends_within_the_time_to_dump_leaves_its_stacks_and_goes_on(tmp_path, clock):
    heard = Heard()
    with Watchdog(tmp_path, 0, 100.0, heard) as watch:
        for _ in range(2):
            watch.alive()
            clock.pass_by(104.0)
        assert not heard.lines
        assert (tmp_path / "stacks" / "rank-00000.txt").read_text().count("in pass_by") == 2  # once in each step
        clock.now += 2.0
        assert heard.event.wait(600)


def test_the_first_step_may_compile_and_zero_watches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.0)
    looked, heard = threading.Semaphore(0), Heard()
    with Watchdog(tmp_path, 0, 0.02, heard) as watch:
        wait = watch._closed.wait
        monkeypatch.setattr(watch._closed, "wait", lambda seconds: (looked.release(), wait(seconds))[1])
        for _ in range(2 * watchdog.LOOKS_PER_LIMIT):  # twice the limit
            assert looked.acquire(timeout=600)
    assert not heard.lines
    with Watchdog(tmp_path, 0, 0.0, heard) as watch:
        watch.alive()
        assert not watch._thread.is_alive()


def test_what_may_take_longer_is_given_longer_and_in_the_end_for_ever(tmp_path, monkeypatch):
    timers = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda limit_s, file: timers.append(limit_s))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.0)
    heard = Heard()
    with Watchdog(tmp_path, 0, 0.001, heard) as watch:
        watch.alive(50.0)
        assert not heard.event.wait(0.1)
        watch.alive(math.inf)
        assert not heard.event.wait(0.1)
        watch.alive(0.0)
        assert heard.event.wait(600)
    assert timers[:3] == [50.0, None, 0.001]


def test_faulthandlers_thread_comes_only_where_the_watchdogs_could_not_run(tmp_path, monkeypatch):
    """It reads the frames of running threads without the GIL, which crashes the process now and then."""
    timers = []
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda limit_s, file: timers.append(limit_s))
    monkeypatch.setattr(watchdog.faulthandler, "cancel_dump_traceback_later", lambda: timers.append(None))
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.1)
    heard = Heard()
    with Watchdog(tmp_path, 0, 0.02, heard) as watch:
        watch.alive()
        assert heard.event.wait(600)
        assert timers == [0.02 + 0.1 / 2, None]


def test_what_hangs_outside_of_a_step_is_not_called_a_step(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "TIME_TO_DUMP_S", 0.2)
    heard = Heard()
    with Watchdog(tmp_path, 0, 0.01, heard) as watch:
        watch.alive(0.05)
        assert heard.event.wait(600)
    assert heard.lines[0][0].startswith("nothing has been computed or written for 0.05 s: the stacks of each rank")
