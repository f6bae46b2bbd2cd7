"""Delays as the links' arithmetic says, to the microsecond: time stands still in these tests unless somebody sleeps."""

import threading

import pytest
import torch

from fake_time import Clock
from zeroshard.comm import Link, NullCommunicator, ThrottledCommunicator, run_threads, split
from zeroshard.comm.wrappers import observe, stopwatch, throttle
from zeroshard.comm.wrappers.throttle import bytes_per_link, num_hops
from zeroshard.comm.wrappers.wrapper import Wrapper

SLOW = Link(latency_s=1e-3, bytes_per_s=1e6)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (observe, stopwatch, throttle):
        monkeypatch.setattr(module, "time", clock)
    return clock


def null(world_size, link=SLOW, **kwargs):
    return ThrottledCommunicator(NullCommunicator(world_size), link, **kwargs)


def whole(num_bytes):
    return torch.zeros(num_bytes, dtype=torch.uint8)


def seconds(clock, wait):
    start = clock.now
    wait()
    return pytest.approx(clock.now - start, abs=3e-6)


def test_each_operation_takes_its_rings_time(clock):
    comm = null(4)
    assert seconds(clock, comm.all_reduce(whole(8000)).wait) == 0.012 + 6e-3
    assert seconds(clock, comm.all_gather(whole(8000), whole(2000)).wait) == 0.006 + 3e-3
    assert seconds(clock, comm.reduce_scatter(whole(2000), whole(8000)).wait) == 0.006 + 3e-3
    assert seconds(clock, comm.broadcast(whole(8000), src=1).wait) == 0.008 + 3e-3
    assert seconds(clock, comm.barrier) == 2e-3


def test_issuing_takes_no_time_and_what_is_computed_meanwhile_hides_the_delay(clock):
    comm = null(2)
    start = clock.now
    work = comm.all_gather(whole(20_000), whole(10_000))  # 11 ms
    assert clock.now == start
    clock.now += 8e-3
    assert seconds(clock, work.wait) == 3e-3
    assert seconds(clock, work.wait) == 0
    work = comm.all_gather(whole(20_000), whole(10_000))
    clock.now += 20e-3
    assert seconds(clock, work.wait) == 0


def test_operations_follow_each_other_whoever_is_waited_for_first(clock):
    comm = null(2)
    first, second = (comm.all_gather(whole(20_000), whole(10_000)) for _ in range(2))
    assert seconds(clock, second.wait) == 22e-3
    assert seconds(clock, first.wait) == 0


def test_a_burst_passes_at_once_after_a_pause_and_not_again(clock):
    comm = null(2, Link(0, 1e6, burst_bytes=4000))
    assert seconds(clock, comm.all_gather(whole(20_000), whole(10_000)).wait) == 6e-3
    assert seconds(clock, comm.all_gather(whole(20_000), whole(10_000)).wait) == 10e-3
    clock.now += 2e-3  # half of it is there again
    assert seconds(clock, comm.all_gather(whole(20_000), whole(10_000)).wait) == 8e-3


def test_a_ring_inside_a_node_knows_nothing_of_the_slow_link(clock):
    comm = null(4, node_size=2)
    row, column = split(comm, [[0, 1], [2, 3]]), split(comm, [[0, 2], [1, 3]])
    assert seconds(clock, row.all_gather(whole(20_000), whole(10_000)).wait) == 0
    # two columns share the one link of a node
    assert seconds(clock, column.all_gather(whole(20_000), whole(10_000)).wait) == 20e-3 + 1e-3
    assert seconds(clock, comm.all_gather(whole(20_000), whole(5000)).wait) == 15e-3 + 3e-3


def test_parts_share_links_and_not_their_order(clock):
    comm = null(4, Link(1e-3, 1e6), node_size=2)
    row, column = split(comm, [[0, 1], [2, 3]]), split(comm, [[0, 2], [1, 3]])
    both = comm.all_gather(whole(40_000), whole(10_000)), column.all_gather(whole(20_000), whole(10_000))
    assert seconds(clock, row.all_reduce(whole(10_000)).wait) == 0
    assert seconds(clock, both[0].wait) == 30e-3 + 3e-3
    assert seconds(clock, both[1].wait) == 50e-3 + 1e-3 - 33e-3  # behind the other one on the link of the node


def test_a_transfer_begins_when_the_last_rank_has_issued_it(clock):
    late_s, transfer_s, first_has_issued = 0.1, 0.05, threading.Event()

    class Issues(Wrapper):
        """Says when the first rank has issued its operation, and stays behind it on the second."""

        def _around(self, op, whole, issue, detail=""):
            if self.rank == 0:
                first_has_issued.set()
            return issue()

    def rank_main(comm):
        throttled = ThrottledCommunicator(Issues(comm), Link(0, 1e6))
        if comm.rank == 1:
            assert first_has_issued.wait(600)
            clock.now += late_s
        work = throttled.all_gather(whole(100_000), whole(50_000))
        work.wait()
        return work.done_s

    assert run_threads(rank_main, 2) == [pytest.approx(1000.0 + late_s + transfer_s, abs=1e-6)] * 2


def test_clocks_that_differ_are_refused(clock):
    class Ahead(NullCommunicator):
        def all_reduce(self, tensor, op="sum"):
            if tensor.dtype == torch.int64:
                tensor += 10**12
            return super().all_reduce(tensor, op)

    comm = ThrottledCommunicator(Ahead(2), SLOW)
    with pytest.raises(RuntimeError, match="the ranks' clocks differ"):
        comm.all_reduce(whole(8)).wait()


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"latency_s": -1.0}, "latency_s: -1.0 is no time"),
        ({"latency_s": float("nan")}, "latency_s: nan is no time"),
        ({"bytes_per_s": 0.0}, "bytes_per_s: 0.0 lets nothing pass"),
        ({"burst_bytes": -1}, "burst_bytes must be at least 0, got -1"),
    ],
)
def test_a_link_that_cannot_be_is_refused(kwargs, line):
    with pytest.raises(ValueError, match=line):
        Link(**kwargs)


def test_an_exchange_sends_each_part_once_and_a_nodes_parts_through_its_one_link():
    assert bytes_per_link("all_to_all", 1000, 4) == 750
    assert num_hops("all_to_all", 4) == 1
    assert num_hops("all_to_all", 1) == 0

    def shares(node_size):
        return ThrottledCommunicator(NullCommunicator(4), Link(0.0, 1e6), node_size=node_size).exchanged

    assert shares(1) == 0.75
    assert shares(2) == 1.0  # each of a node's two ranks sends two of its four parts through the node's link
    assert shares(4) == 0.0
