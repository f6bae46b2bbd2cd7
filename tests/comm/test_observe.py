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


def test_an_operation_is_a_span_of_the_profiler_where_one_runs(observed):
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
        labelled("blocks.3/weights"),
    ):
        observed.all_reduce(torch.zeros(1)).wait()
    names = {event.name for event in profile.events()}
    assert {"all_reduce blocks.3/weights", "wait blocks.3/weights"} <= names
