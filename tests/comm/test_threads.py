import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

from zeroshard.comm import PeerError, labelled, run_threads, split
from zeroshard.comm.backends import threads


def test_sums_run_in_the_order_of_ranks():
    values = [1.0, 1e8, -1e8, 3.0]

    def go(comm):
        tensor = torch.tensor([values[comm.rank]])
        comm.all_reduce(tensor).wait()
        return tensor.item()

    total = torch.tensor(values[0])
    for value in values[1:]:
        total = total + torch.tensor(value)
    assert run_threads(go, 4) == [total.item()] * 4


def test_what_a_rank_raised_is_raised_and_the_others_are_stopped():
    stopped = []

    def go(comm):
        if comm.rank == 1:
            raise KeyError("mine")
        try:
            comm.barrier()
        except PeerError:
            stopped.append(comm.rank)
            raise

    with pytest.raises(KeyError, match="mine"):
        run_threads(go, 3)
    assert sorted(stopped) == [0, 2]


def _under_another_label(comm):
    with labelled(f"unit {comm.rank}"):
        comm.all_reduce(torch.zeros(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda comm: comm.all_reduce(torch.zeros(2 + comm.rank)),
        lambda comm: comm.all_reduce(torch.zeros(2), "max" if comm.rank else "sum"),
        lambda comm: comm.all_reduce(torch.zeros(2, dtype=torch.float64 if comm.rank else torch.float32)),
        lambda comm: comm.broadcast(torch.zeros(2), src=comm.rank),
        lambda comm: comm.all_reduce(torch.zeros(2)) if comm.rank else comm.broadcast(torch.zeros(2), src=0),
        lambda comm: split(comm, [[0], [1]] if comm.rank else [[1], [0]]),
        _under_another_label,
    ],
)
def test_ranks_that_call_different_things_are_told_which(call):
    with pytest.raises(RuntimeError, match=r"ranks diverged: rank \d called \('.*, rank \d called \('"):
        run_threads(call, 2)


def test_a_rank_that_never_comes_is_not_waited_for_for_ever(monkeypatch):
    limits_s, barrier = [], threading.Barrier

    def noted(parties, action, timeout):
        limits_s.append(timeout)
        return barrier(parties, action, timeout)

    monkeypatch.setattr(threading, "Barrier", noted)
    with pytest.raises(PeerError, match="did not come to the collective in time"):
        run_threads(lambda comm: comm.barrier() if comm.rank else None, 2, timeout_s=0.2)
    assert limits_s == [0.2]


def test_a_world_has_at_least_one_rank():
    with pytest.raises(ValueError, match=r"^world_size must be at least 1, got 0"):
        run_threads(lambda comm: None, 0)


def test_a_rank_that_fails_stops_those_who_meet_in_parts():
    def go(comm):
        part = split(comm, [[0, 1], [2, 3]])
        part.barrier()
        if comm.rank == 3:
            raise KeyError("rank 3")
        part.barrier()

    with pytest.raises(KeyError, match="rank 3"):
        run_threads(go, 4, timeout_s=3600)  # which the time limit of tests would not wait for


class _Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_no_dispatch_mode_of_a_thread_is_thought_to_go_on():
    steps = [threading.Event() for _ in range(3)]

    def go(comm):
        if comm.rank == 0:
            with _Nothing():
                steps[0].set()
                steps[1].wait(60)
            steps[2].set()
        else:
            steps[0].wait(60)
            with _Nothing():
                steps[1].set()
                steps[2].wait(60)

    run_threads(go, 2)
    assert not is_in_torch_dispatch_mode()


def test_on_a_gpu_ranks_meet_when_their_streams_are_done_and_part_when_they_have_read(monkeypatch):
    """Each rank has streams of its own, which nothing else orders."""
    seen, meet = defaultdict(list), threads._Table.meet

    def note(what):
        seen[threading.get_ident()].append(what)

    def met(self):
        meet(self)
        note("all have met")

    stream = SimpleNamespace(synchronize=lambda: note("the stream is done"))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(threads._Table, "meet", met)
    run_threads(lambda comm: comm.all_gather(torch.zeros(2), torch.ones(1)), 2)
    assert list(seen.values()) == [["the stream is done", "all have met"] * 2] * 2
