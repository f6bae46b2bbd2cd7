import time

import pytest
import torch

from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator, labelled, split


@pytest.fixture
def observed():
    return ObservedCommunicator(NullCommunicator(4, 1))


def test_bytes_are_those_of_the_unsharded_tensor(observed):
    observed.all_reduce(torch.zeros(8))
    observed.reduce_scatter(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16))
    observed.all_gather(torch.zeros(8, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    observed.broadcast(torch.zeros(3, dtype=torch.uint8), src=0)
    observed.barrier()
    assert [(record.op, record.num_bytes) for record in observed.records] == [
        ("all_reduce", 32),
        ("reduce_scatter", 16),
        ("all_gather", 64),
        ("broadcast", 3),
        ("barrier", 0),
    ]


def test_totals_keep_control_messages_apart(observed):
    for label, numel in (("a", 1), ("b", 2), (CONTROL, 100)):
        with labelled(label):
            observed.all_reduce(torch.zeros(numel))
    assert observed.totals() == {"all_reduce": 12}
    assert observed.totals(control=True) == {"all_reduce": 400}


def test_what_parts_send_is_recorded_in_order_with_the_ranks_that_took_part():
    comm = ObservedCommunicator(NullCommunicator(4, 1))
    part = split(comm, [[0, 1], [2, 3]])
    comm.all_reduce(torch.zeros(1))
    part.all_reduce(torch.zeros(2))
    split(part, [[0], [1]]).all_reduce(torch.zeros(3))
    assert [(record.num_bytes, record.world_size) for record in comm.drain()] == [(4, 4), (8, 2), (12, 1)]
    part.barrier()
    assert [record.op for record in comm.drain()] == ["barrier"]


class Later(NullCommunicator):
    """Its operations end when the test says so."""

    def __init__(self, world_size):
        super().__init__(world_size)
        self.listeners = []

    def all_reduce(self, tensor, op="sum"):
        return self

    def add_done_callback(self, ended):
        self.listeners.append(ended)

    def wait(self):
        pass


def test_a_timed_record_tells_when_its_operation_had_ended():
    inner = Later(2)
    timed = ObservedCommunicator(inner, timed=True)
    with labelled("blocks.3/weights"):
        timed.all_reduce(torch.zeros(1))
    timed.all_gather(torch.zeros(2), torch.zeros(1))
    late, at_once = timed.records
    assert late.phase_label == "blocks.3/weights/forward"
    assert late.ended_at_s is None
    assert at_once.issued_at_s <= at_once.ended_at_s
    inner.listeners.pop()(1234.5)
    assert late.ended_at_s == 1234.5


def test_an_operation_is_a_span_of_the_profiler_where_one_runs(observed):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        labelled("blocks.3/weights"),
    ):
        observed.all_reduce(torch.zeros(1)).wait()
    names = {event.name for event in profile.events()}
    assert {"all_reduce blocks.3/weights", "wait blocks.3/weights"} <= names


def _ended(comm):
    observed = ObservedCommunicator(comm, timed=True)
    observed.all_reduce(torch.ones(1000)).wait()
    observed.all_gather(torch.empty(2000), torch.ones(1000)).wait()
    deadline = time.perf_counter() + 60
    while any(record.ended_at_s is None for record in observed.records) and time.perf_counter() < deadline:
        time.sleep(0.001)  # gloo tells on a thread of its own
    return [record.ended_at_s - record.issued_at_s > 0 for record in observed.records]


def test_gloo_tells_when_it_has_ended(gloo_ranks):
    assert gloo_ranks(2).run(_ended) == [[True, True]] * 2
