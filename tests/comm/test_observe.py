import time

import pytest
import torch

from zeroshard.comm import CONTROL, Communicator, NullCommunicator, ObservedCommunicator, scope, split


@pytest.fixture
def observed():
    return ObservedCommunicator(NullCommunicator(4, 1))


def test_bytes_are_those_of_the_whole_tensor(observed):
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


def test_each_record_has_the_callers_label(observed):
    with scope("blocks.3/weights"):
        observed.all_reduce(torch.zeros(1))
    observed.all_reduce(torch.zeros(1))
    assert [record.scope for record in observed.records] == ["blocks.3/weights", ""]


def test_totals_keep_control_messages_apart(observed):
    for label, numel in (("a", 1), ("b", 2), (CONTROL, 100)):
        with scope(label):
            observed.all_reduce(torch.zeros(numel))
    assert observed.totals() == {"all_reduce": 12}
    assert observed.totals(control=True) == {"all_reduce": 400}


def test_draining_takes_the_records_away(observed):
    observed.barrier()
    assert [record.op for record in observed.drain()] == ["barrier"]
    assert observed.records == []
    assert observed.drain() == []


class Slow(NullCommunicator):
    """Takes a while to issue, and longer to finish."""

    def all_reduce(self, tensor, op="sum"):
        time.sleep(0.01)
        return self

    def wait(self):
        time.sleep(0.03)


def test_issuing_and_waiting_are_timed_apart():
    observed = ObservedCommunicator(Slow(2))
    work = observed.all_reduce(torch.zeros(1))
    (record,) = observed.records
    assert record.issue_s >= 0.01
    assert record.wait_s == 0.0
    work.wait()
    assert record.wait_s >= 0.03
    assert record.issue_s < record.wait_s


def test_an_operation_that_was_refused_is_not_recorded(observed):
    with pytest.raises(ValueError, match="op: 'mean'"):
        observed.all_reduce(torch.zeros(1), "mean")
    assert observed.records == []


def test_observers_can_be_stacked(observed):
    outer = ObservedCommunicator(observed)
    outer.all_reduce(torch.zeros(2))
    assert [r.num_bytes for r in outer.records] == [r.num_bytes for r in observed.records] == [8]
    assert isinstance(outer, Communicator)
    assert (outer.rank, outer.world_size, outer.uniform_order) == (1, 4, True)


def test_what_parts_send_is_recorded_in_order_with_the_ranks_that_took_part():
    comm = ObservedCommunicator(NullCommunicator(4, 1))
    part = split(comm, [[0, 1], [2, 3]])
    comm.all_reduce(torch.zeros(1))
    part.all_reduce(torch.zeros(2))
    split(part, [[0], [1]]).all_reduce(torch.zeros(3))
    assert [(record.num_bytes, record.world_size) for record in comm.drain()] == [(4, 4), (8, 2), (12, 1)]
    part.barrier()
    assert [record.op for record in comm.drain()] == ["barrier"]
