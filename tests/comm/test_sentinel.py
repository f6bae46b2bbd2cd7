import threading
import time

import pytest
import torch
import torch.distributed as dist

from zeroshard.comm import NullCommunicator, PeerError, scope, sentinel, split
from zeroshard.comm.sentinel import MemoryBoard, SentinelCommunicator, StoreBoard, first_difference


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(sentinel, "PULSE_S", 0.02)
    monkeypatch.setattr(sentinel, "LOST_AFTER_S", 0.3)


class Watched:
    """Sentinels over ranks that never wait for each other, and the faults that each was told."""

    def __init__(self, world_size, board=None, **kwargs):
        board = board or MemoryBoard()
        self.finders = []
        self.told = [[] for _ in range(world_size)]
        self.heard = [threading.Event() for _ in range(world_size)]
        self.ranks = [
            SentinelCommunicator(NullCommunicator(world_size, rank), board, self._hear(rank), **kwargs)
            for rank in range(world_size)
        ]

    def _hear(self, rank):
        def hear(line, found_here):
            self.told[rank].append(line)
            self.finders += [rank] * found_here
            self.heard[rank].set()

        return hear

    def close(self):
        for rank in self.ranks:
            rank.close()


def work(comm, units):
    for unit in units:
        with scope(f"{unit}/grads"):
            comm.reduce_scatter(torch.zeros(2), torch.zeros(6)).wait()


def test_ranks_that_do_the_same_are_left_alone():
    watched = Watched(3)
    for comm in watched.ranks:
        work(comm, [f"blocks.{i}" for i in range(200)])
        comm.barrier()
    assert not any(event.wait(0.2) for event in watched.heard)
    watched.close()
    assert watched.told == [[], [], []]


def test_what_parts_do_is_watched_under_the_ranks_of_the_world():
    watched = Watched(6)
    rows = [split(comm, [[0, 1, 2], [3, 4, 5]]) for comm in watched.ranks]
    for comm, row in zip(watched.ranks, rows, strict=True):
        comm.barrier()
        work(row, ["blocks.0"])
    assert not any(event.wait(0.1) for event in watched.heard)
    for rank, row in enumerate(rows):
        work(row, ["blocks.2" if rank == 3 else "blocks.1"])
    assert all(event.wait(5.0) for event in watched.heard)
    watched.close()
    (line,) = {line for told in watched.told for line in told}
    assert line.startswith("ranks diverged at operation 2: ")
    assert "rank 3 issued reduce_scatter" in line


@pytest.mark.parametrize("board", [MemoryBoard, lambda: StoreBoard(dist.HashStore())])
def test_a_rank_that_skips_a_layer_is_named_with_the_layer_on_every_rank(board):
    watched = Watched(3, board())
    for comm in watched.ranks:
        work(comm, ["a", "b", "d"] if comm.rank == 2 else ["a", "b", "c", "d"])
    assert all(event.wait(10) for event in watched.heard)
    watched.close()
    line = (
        "ranks diverged at operation 2: rank 0 issued reduce_scatter sum of 24 bytes for c/grads, "
        "rank 2 issued reduce_scatter sum of 24 bytes for d/grads"
    )
    assert watched.told == [[line], [line], [line]]
    assert watched.finders == [2]  # the others read its verdict


def test_a_silent_rank_is_lost_once_somebody_waits_for_it():
    watched = Watched(2, stall_s=0.1)
    watched.ranks[1].close()
    assert not watched.heard[0].wait(0.5)  # nobody waits: it may be at work
    with watched.ranks[0].waiting():
        assert watched.heard[0].wait(10)
    watched.close()
    assert watched.told[0] == ["rank 1 has not answered for 0 s: it is stopped or lost"]


def test_after_a_collective_failed_the_rank_that_fell_silent_is_named_with_what_it_did_last():
    watched = Watched(3, stall_s=100)
    for comm in watched.ranks:
        work(comm, ["a", "b"])
    time.sleep(0.1)  # for a pulse
    watched.ranks[2].close()
    with pytest.raises(PeerError) as failure, watched.ranks[0].waiting():
        raise PeerError("read error: connection reset")
    watched.close()
    last = "reduce_scatter sum of 24 bytes for b/grads as operation 1"
    line = f"rank 2 is gone; when it was last heard of, it had issued {last}; see what it printed"
    assert str(failure.value) == line


class _Gone(MemoryBoard):
    def post(self, key, value):
        raise dist.DistNetworkError("broken pipe")


def test_where_the_board_is_gone_its_keeper_is():
    comm = SentinelCommunicator(NullCommunicator(3, 1), _Gone(), lambda line, found_here: None)
    with pytest.raises(PeerError, match=r"^rank 0, or the launcher, is gone: the store"), comm.waiting():
        raise PeerError("read error: connection reset")
    comm.close()


class _CutOff(MemoryBoard):
    """A store behind a link that is down: nothing fails, and nothing comes back."""

    def __init__(self):
        super().__init__()
        self.is_down, self.back = threading.Event(), threading.Event()

    def post(self, key, value):
        if self.is_down.is_set():
            self.back.wait(30)
        super().post(key, value)


def test_a_board_that_is_cut_off_is_told_by_whoever_waits():
    board, heard, told = _CutOff(), threading.Event(), []

    def on_fault(line, found_here):
        told.append((line, found_here))
        heard.set()

    comm = SentinelCommunicator(NullCommunicator(2, 1), board, on_fault, stall_s=0.1)
    board.is_down.set()
    assert not heard.wait(0.5)  # nobody waits: it may come back
    with comm.waiting():
        assert heard.wait(10)
    assert told == [("rank 0, or its machine, has not answered for 0 s: it is cut off", True)]
    board.back.set()
    comm.close()


def test_rank_0_which_keeps_the_board_stays_until_the_others_have_heard():
    board, heard = MemoryBoard(), threading.Event()
    comm = SentinelCommunicator(NullCommunicator(2, 0), board, lambda line, found_here: heard.set())
    began = time.monotonic()
    board.post("verdict", b"rank 7 is lost")
    assert not heard.wait(1.5 * sentinel.PULSE_S)
    board.post("heard1", b"1")
    assert heard.wait(10)
    assert time.monotonic() - began >= sentinel.PULSE_S
    comm.close()


def test_a_slow_rank_is_no_lost_one():
    watched = Watched(2, stall_s=0.1)
    with watched.ranks[0].waiting():
        assert not watched.heard[0].wait(1.0)
    watched.close()


def test_operations_of_another_order_or_kind_differ():
    pages = []
    for calls in (["x", "y", "z"], ["x", "z", "y"]):
        comm = SentinelCommunicator(NullCommunicator(3), MemoryBoard(), lambda line, found_here: None)
        work(comm, calls)
        pages.append(comm._watch.diary.page())
        comm.close()
    assert first_difference(pages[0], pages[0]) is None
    place, one, other = first_difference(*pages)
    assert (place, "y/grads" in one, "z/grads" in other) == (1, True, True)
