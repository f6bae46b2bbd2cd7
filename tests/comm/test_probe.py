import math
import time

import pytest

from zeroshard.comm import Link, RingCommunicator, ThrottledCommunicator, run_threads, thread_transports
from zeroshard.comm.probe import Probed, probe, why_not_comparable


@pytest.fixture
def short(monkeypatch):
    """Transfers that take a tenth of the time."""
    monkeypatch.setattr("zeroshard.comm.probe.LONG_S", 0.06)
    monkeypatch.setattr("zeroshard.comm.probe.SHORT_S", 0.02)
    monkeypatch.setattr("zeroshard.comm.probe.PAUSE_S", 0.005)


def probed(world_size, link, node_size=1, real=None):
    transports = thread_transports(world_size, timeout_s=30)

    def rank_main(comm):
        ring = RingCommunicator(transport=transports[comm.rank])
        throttled = ThrottledCommunicator(ring, real or link, node_size=node_size)
        try:
            return probe(throttled, link, node_size)
        finally:
            ring.close()

    return run_threads(rank_main, world_size)


@pytest.mark.parametrize(("world_size", "node_size"), [(2, 1), (3, 1), (4, 2)])
def test_a_probe_finds_the_bandwidth_of_a_link_whatever_bursts_and_latencies_add(short, world_size, node_size):
    link = Link(latency_s=4e-3, bytes_per_s=20e6, burst_bytes=50_000)
    found = probed(world_size, link, node_size)
    assert [each is not None for each in found] == [rank % node_size == 0 for rank in range(world_size)]
    assert found[0].bytes_per_s == pytest.approx(20e6, rel=0.05)
    assert 4e-3 <= found[0].latency_s < 8e-3


def test_a_link_eight_times_as_fast_is_found_out(short):
    asked, real = Link(bytes_per_s=10e6), Link(bytes_per_s=80e6)  # bits taken for bytes
    found = probed(2, asked, real=real)[0]
    assert found.bytes_per_s == pytest.approx(80e6, rel=0.1)
    assert why_not_comparable(asked, found).startswith("bandwidth: asked 80 Mbit/s, achieved 6")


def test_what_is_off_by_more_than_a_twentieth_is_not_comparable():
    asked = Link(latency_s=1e-2, bytes_per_s=125e6)
    assert why_not_comparable(asked, Probed(125e6 * 1.04, 1.04e-2, 1.0)) == ""
    assert why_not_comparable(asked, Probed(125e6 * 0.96, 0.96e-2, 1.0)) == ""
    slow = "bandwidth: asked 1,000 Mbit/s, achieved 900 Mbit/s (-10.0%)"
    assert why_not_comparable(asked, Probed(125e6 * 0.9, 1e-2, 1.0)) == slow
    late = "latency: asked 10000 us, achieved 1.1e+04 us (+10.0%)"
    assert why_not_comparable(asked, Probed(125e6, 1.1e-2, 1.0)) == late
    assert why_not_comparable(asked, Probed(125e6 * 0.9, 1.1e-2, 1.0)) == f"{slow}; {late}"


def test_what_was_not_asked_for_is_not_compared():
    assert why_not_comparable(Link(), Probed(1e6, 1.0, 1.0)) == ""
    assert why_not_comparable(Link(latency_s=5e-5), Probed(1e6, 9.9e-5, 1.0)) == ""  # a process is woken so late
    assert why_not_comparable(Link(bytes_per_s=math.inf, latency_s=5e-5), Probed(1e6, 1.1e-4, 1.0)) != ""


def test_a_probe_takes_a_few_seconds_at_most(short):
    start = time.perf_counter()
    found = probed(2, Link(bytes_per_s=1e6))[0]
    assert found.seconds <= time.perf_counter() - start < 5
