"""Tensors of any kind arrive as they were sent, in messages of the size that was promised."""

import os
import pickle
from collections import OrderedDict, deque
from pathlib import Path

import pytest
import torch

from zeroshard.comm import ObservedCommunicator, run_threads
from zeroshard.comm.tensor_broadcast import MAX_PENDING_BROADCASTS, PendingBroadcasts, as_bytes, gather_to, put_bytes

KINDS = [
    torch.arange(6.0).view(2, 3).t(),
    torch.tensor(1.5),
    torch.empty(0, 2),
    torch.arange(3) + 1j,
    torch.tensor([True, False]),
    torch.arange(8, dtype=torch.bfloat16)[::2],
    torch.arange(5, dtype=torch.uint8),
]


@pytest.mark.parametrize("index", range(len(KINDS)))
def test_bytes_make_the_tensor_again(index):
    sent = KINDS[index]
    target = torch.empty_strided(sent.shape, sent.stride(), dtype=sent.dtype)
    padded = torch.cat([torch.zeros(1, dtype=torch.uint8), as_bytes(sent)])  # as in the midst of a message
    put_bytes(target, padded[1:])
    assert torch.equal(target, sent)
    assert as_bytes(sent).numel() == sent.nbytes


def test_packed_and_alone_tensors_arrive():
    def go(comm):
        mine = [torch.full_like(x, comm.rank) for x in KINDS]
        pending = PendingBroadcasts(comm, "test")
        pending.issue(mine[:4], 1)
        for x in mine[4:]:
            pending.issue([x], 2)
        pending.wait()
        return mine

    for found in run_threads(go, 3):
        for index, (x, kind) in enumerate(zip(found, KINDS, strict=True)):
            assert torch.equal(x, torch.full_like(kind, 1 if index < 4 else 2))


def test_so_many_are_under_way_and_no_more():
    class Work:
        def __init__(self, log):
            self.log = log

        def wait(self):
            self.log.append(-1)

    class Comm:
        rank, world_size = 1, 2

        def __init__(self):
            self.log = []

        def broadcast(self, tensor, src):
            self.log.append(1)
            return Work(self.log)

    comm = Comm()
    pending = PendingBroadcasts(comm, "test")
    for _ in range(3 * MAX_PENDING_BROADCASTS):
        pending.issue([torch.zeros(2), torch.zeros(3)], 0)
    pending.wait()
    under_way = torch.tensor(comm.log).cumsum(0)
    assert under_way.max() == MAX_PENDING_BROADCASTS
    assert under_way[-1] == 0


@pytest.mark.redundant
def test_values_are_gathered_with_all_that_they_nest():
    def value(rank):
        return {rank: {"list": [x + rank if x.dtype != torch.bool else x for x in KINDS], "step": rank, "none": None}}

    def go(comm):
        observed = ObservedCommunicator(comm)
        given = value(comm.rank)
        found = gather_to(observed, given, 1, bucket_bytes=16)
        if comm.rank == 1:  # its own are copies too
            assert found[1][1]["list"][0].data_ptr() != given[1]["list"][0].data_ptr()
        return found, [r.num_bytes for r in observed.records if r.label == "state"]

    by_rank = run_threads(go, 3)
    assert [len(found) for found, _ in by_rank] == [0, 3, 0]
    for rank, found in enumerate(by_rank[1][0]):
        expected = value(rank)[rank]
        assert (found[rank]["step"], found[rank]["none"]) == (rank, None)
        for x, y in zip(found[rank]["list"], expected["list"], strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
    assert all(max(sizes) == 16 for _, sizes in by_rank)


class _Calls:
    """A value whose pickle calls a function where it is opened."""

    def __init__(self, function, *args):
        self._call = function, args

    def __reduce__(self):
        return self._call


PLAIN = {
    "numbers": [1, 2.5, True, None, "x", b"y", 1 + 2j, range(3), slice(1, 2)],
    "containers": {"a": (1, {2, 3}), "b": OrderedDict(c=[1]), "d": {"e": frozenset({4})}},
    "torch": [torch.float32, torch.Size([2]), torch.device("cpu"), torch.ones(2), torch.eye(2).to_sparse()],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_and_containers_arrive(name):
    found = run_threads(lambda comm: gather_to(comm, PLAIN[name], 0, bucket_bytes=16), 2)[0]
    assert len(found) == 2
    for each in found:
        assert str(each) == str(PLAIN[name])


@pytest.mark.parametrize(
    "value",
    [
        _Calls(os.system, "exit 7"),
        _Calls(eval, "1 + 1"),
        _Calls(getattr, "x", "upper"),
        _Calls(torch.load, "nowhere"),
        _Calls(torch.storage._load_from_bytes, pickle.dumps(_Calls(os.getpid))),
        Path("x"),
        deque([1]),
    ],
)
def test_what_would_call_something_where_it_arrives_is_sent_to_nobody(value):
    def send(comm):
        with pytest.raises(RuntimeError, match=r"the values that rank 1 holds cannot be sent: .*; keep tensors, plain"):
            gather_to(comm, value if comm.rank == 1 else 0, 0, bucket_bytes=16)

    run_threads(send, 2)
