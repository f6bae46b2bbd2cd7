import pytest

from fake_time import Clock
from zeroshard.comm import Link, NullCommunicator, ThrottledCommunicator
from zeroshard.comm import probe as probe_module
from zeroshard.comm.probe import Probed, probe, why_not_comparable
from zeroshard.comm.ring import small
from zeroshard.comm.wrappers import throttle


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(throttle, "time", clock)
    monkeypatch.setattr(probe_module, "time", clock)
    return clock


@pytest.mark.redundant(but=["link0-4-2"])
@pytest.mark.parametrize(("world_size", "node_size"), [(2, 1), (4, 2)])
@pytest.mark.parametrize("link", [Link(4e-3, 20e6, 50_000), Link(0, 625e6, 2_500_000), Link(5e-5, 1e12)])
def test_a_probe_finds_the_link_whatever_bursts_and_latencies_add(clock, link, world_size, node_size):
    comm = ThrottledCommunicator(NullCommunicator(world_size), link, node_size=node_size)
    found = probe(comm, link, node_size)
    assert found.bytes_per_s == pytest.approx(link.bytes_per_s, rel=1e-3 if link.bytes_per_s < 1e12 else 0.2)
    assert found.latency_s == pytest.approx(link.latency_s, abs=3e-6)
    assert found.seconds < 6


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_latency_of_a_link_is_found_though_a_ring_sends_small_messages_in_fewer_rounds(clock, world_size):
    link = Link(latency_s=4e-3, bytes_per_s=1e7)

    class Ring(NullCommunicator):
        """Over links with a full bucket: the first 64 KiB of an operation take no time."""

        def _take(self, num_bytes, is_small, hops):
            rounds = (self.world_size - 1).bit_length() if is_small else hops
            clock.now += rounds * link.latency_s + max(num_bytes - 65536, 0) / link.bytes_per_s

        def all_reduce(self, tensor, op="sum"):
            sent = 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
            self._take(sent, small.is_small(tensor.nbytes, self.world_size), 2 * (self.world_size - 1))
            return super().all_reduce(tensor, op)

        def all_gather(self, output, input):
            sent = output.nbytes - input.nbytes
            self._take(sent, small.is_small(input.nbytes, self.world_size), self.world_size - 1)
            return super().all_gather(output, input)

    found = probe(Ring(world_size), link, ring_messages=True)
    assert found.latency_s == pytest.approx(link.latency_s, rel=1e-3)
    assert why_not_comparable(link, found) == ""


def test_only_the_first_rank_of_a_node_talks(clock):
    link = Link(0, 1e6)
    comm = ThrottledCommunicator(NullCommunicator(4, rank=1), link, node_size=2)
    assert probe(comm, link, node_size=2) is None
    assert clock.now == 1000.0


def test_bits_taken_for_bytes_are_found_out(clock):
    asked, real = Link(bytes_per_s=5e6), Link(bytes_per_s=40e6)
    found = probe(ThrottledCommunicator(NullCommunicator(2), real), asked)
    assert found.bytes_per_s == pytest.approx(40e6, rel=1e-3)
    assert why_not_comparable(asked, found) == "bandwidth: asked 40 Mbit/s, achieved 320 Mbit/s (+700.0%)"


def test_what_is_off_by_more_than_a_twentieth_is_not_comparable():
    asked = Link(latency_s=1e-2, bytes_per_s=125e6)
    assert why_not_comparable(asked, Probed(125e6 * 1.04, 1.04e-2, 1.0)) == ""
    assert why_not_comparable(asked, Probed(125e6 * 0.96, 0.96e-2, 1.0)) == ""
    slow = "bandwidth: asked 1,000 Mbit/s, achieved 900 Mbit/s (-10.0%)"
    assert why_not_comparable(asked, Probed(125e6 * 0.9, 1e-2, 1.0)) == slow
    late = "latency: asked 10000 us, achieved 1.1e+04 us (+10.0%)"
    assert why_not_comparable(asked, Probed(125e6, 1.1e-2, 1.0)) == late
    assert why_not_comparable(asked, Probed(125e6 * 0.9, 1.1e-2, 1.0)) == f"{slow}; {late}"


@pytest.mark.redundant
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_an_operation_costs_beside_its_hops_is_no_latency(clock, world_size):
    """Code that takes 200 us in each call, on a link of 50 us."""

    class Slow(ThrottledCommunicator):
        def all_reduce(self, tensor, op="sum"):
            clock.now += 2e-4
            return super().all_reduce(tensor, op)

        def all_gather(self, output, input):
            clock.now += 2e-4
            return super().all_gather(output, input)

    link = Link(latency_s=5e-5, bytes_per_s=1e8)
    found = probe(Slow(NullCommunicator(world_size), link), link)
    assert found.latency_s == pytest.approx(5e-5, abs=1e-6)
    assert why_not_comparable(link, found) == ""
