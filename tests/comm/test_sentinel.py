import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fake_time import Clock
from zeroshard.comm import NullCommunicator, ObservedCommunicator, PeerError, labelled, split
from zeroshard.comm.operation_log import first_difference
from zeroshard.comm.wrappers import sentinel
from zeroshard.comm.wrappers.place import Place
from zeroshard.comm.wrappers.sentinel import SentinelCommunicator, StoreBoard


class MemoryBoard:
    """A board for the thread ranks of one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def post(self, key: str, value: bytes) -> None:
        """Set a key."""
        self._values[key] = value

    def read(self, key: str) -> bytes | None:
        """A key's value, or None."""
        return self._values.get(key)


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
        with labelled(f"{unit}/grads"):
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
    assert all(event.wait(600) for event in watched.heard)
    watched.close()
    (line,) = {line for told in watched.told for line in told}
    assert line.startswith("ranks diverged at operation 2: ")
    assert "rank 3 issued reduce_scatter" in line


@pytest.mark.parametrize("board", [MemoryBoard, lambda: StoreBoard(dist.HashStore())])
def test_a_rank_that_skips_a_layer_is_named_with_the_layer_on_every_rank(board):
    watched = Watched(3, board())
    for comm in watched.ranks:
        work(comm, ["a", "b", "d"] if comm.rank == 2 else ["a", "b", "c", "d"])
    assert all(event.wait(600) for event in watched.heard)
    watched.close()
    line = (
        "ranks diverged at operation 2: rank 0 issued reduce_scatter sum of 24 bytes for c/grads, "
        "rank 2 issued reduce_scatter sum of 24 bytes for d/grads"
    )
    assert watched.told == [[line], [line], [line]]
    assert watched.finders == [2]  # the others read its verdict


@pytest.fixture
def clock(monkeypatch):
    """Pulses come when a test says, by `pulse`, and time moves when it says."""
    clock = Clock()
    monkeypatch.setattr(sentinel, "time", clock)
    monkeypatch.setattr(sentinel, "PULSE_S", 1000.0)  # the watching threads wait until they are closed
    monkeypatch.setattr(sentinel, "LOST_AFTER_S", 8.0)
    return clock


def pulse(comm):
    """What a rank does at each pulse: it posts, and looks for a fault, which is returned."""
    return comm._watch._look()


class OnDevice(NullCommunicator):
    """Collectives of a device that are over when the test says so, and never hold the host up."""

    def __init__(self, world_size):
        super().__init__(world_size)
        self.over, self.num_waits = set(), 0

    def all_reduce(self, tensor, op="sum"):
        number, self.num_waits = self.num_waits, self.num_waits + 1
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: number in self.over)


@pytest.mark.parametrize("waits", [False, True])
def test_a_stall_of_a_device_is_seen_though_no_wait_holds_the_host(clock, monkeypatch, waits):
    """By the collective's handle until it is waited for, then by an event behind the wait."""
    events = []

    class Event:
        passed = False

        def record(self, stream):
            events.append(self)

        def query(self):
            return self.passed

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    board, inner = MemoryBoard(), OnDevice(2)
    ours = SentinelCommunicator(inner, board, lambda *_: None, stall_s=8.0)
    other = SentinelCommunicator(NullCommunicator(2, 1), board, lambda *_: None)
    there = SimpleNamespace(nbytes=8, device=torch.device("cuda", 0))
    for _ in range(2):
        reduction = ours.all_reduce(there)
        if waits:
            reduction.wait()
        other.all_reduce(torch.zeros(2))
    pulse(other)  # its last one
    assert pulse(ours) is None
    clock.sleep(7)
    if waits:
        events[0].passed = True
    else:
        inner.over.add(0)
    assert pulse(ours) is None
    clock.sleep(7)
    assert pulse(ours) is None  # the second has been the oldest for 7 s
    clock.sleep(2)
    assert pulse(ours) is None  # it looks at the other rank from here on
    clock.sleep(9)
    stalled = pulse(ours)
    ours.close()
    other.close()
    assert stalled == ("rank 1 has not answered for 8 s: it is stopped or lost", True)


def test_after_a_collective_failed_the_rank_that_fell_silent_is_named_with_what_it_did_last(clock, monkeypatch):
    watched = Watched(3, stall_s=100)
    for comm in watched.ranks:
        work(comm, ["a", "b"])
        pulse(comm)
    monkeypatch.setattr(clock, "sleep", lambda seconds: pulse(watched.ranks[1]))  # and no more of rank 2
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
            assert self.back.wait(600)
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
        assert heard.wait(600)
    assert told == [("rank 0, or its machine, has not answered for 0 s: it is cut off", True)]
    board.back.set()
    comm.close()


@pytest.mark.parametrize(
    ("lives", "hears_at", "pulses"),
    [(True, 7, 7), (True, None, sentinel.HEARING_PULSES), (False, None, sentinel.NAMING_PULSES)],
    ids=["a busy rank", "one that computes", "one that is lost"],
)
def test_rank_0_which_keeps_the_board_stays_until_the_others_have_heard(clock, monkeypatch, lives, hears_at, pulses):
    board = MemoryBoard()
    ours, other = (SentinelCommunicator(NullCommunicator(2, rank), board, lambda *_: None) for rank in range(2))
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if lives:
            pulse(other)
        if len(slept) == hears_at:
            board.post("heard1", b"1")

    monkeypatch.setattr(clock, "sleep", sleep)
    pulse(other)
    ours._watch._let_others_hear()
    ours.close()
    other.close()
    assert len(slept) == pulses


def test_no_operation_of_rank_0_raises_a_fault_before_the_others_have_heard():
    """What raises it may end the process, and the board with it."""
    known, over = [], threading.Event()

    class Board(MemoryBoard):
        def read(self, key):
            if key == "heard1":
                known.append(comm._watch.fault)
                return b"1"
            return super().read(key)

    board = Board()
    comm = SentinelCommunicator(NullCommunicator(2, 0), board, lambda *_: over.set(), raised=threading.Event())
    board.post("verdict", b'{"fault": "rank 7 is lost"}')
    assert over.wait(600)
    comm.close()
    assert known == [""]
    with pytest.raises(PeerError, match=r"^rank 7 is lost$"):
        comm.barrier()


def test_a_slow_rank_is_no_lost_one_and_a_silent_one_is(clock):
    watched = Watched(2)
    with watched.ranks[0].waiting():
        for _ in range(20):
            clock.now += 7.0
            pulse(watched.ranks[1])
            assert pulse(watched.ranks[0]) is None
        clock.now += 7.0
        assert pulse(watched.ranks[0]) is None
        clock.now += 2.0
        assert pulse(watched.ranks[0]) == ("rank 1 has not answered for 8 s: it is stopped or lost", True)
    watched.close()


@pytest.mark.parametrize(
    "value", [b"", b"hello", b"3", b"[1, 2]", b'{"fault": 3}', b"[1, 2, [[]], [3], 4]", b"[" * 99999, b"\xff"]
)
def test_what_others_write_into_the_store_is_told_once_and_the_watch_goes_on(clock, caplog, value):
    watched = Watched(3)
    ours, other, _ = watched.ranks
    board = ours._watch._board
    work(ours, ["a", "b"])
    work(other, ["a", "c"])
    for key in ("rank0", "verdict") * 2:
        board.post(key, value)
        assert pulse(other) is None
    assert [record.message.split(" that ")[0] for record in caplog.records] == [
        f"the ranks' store has a value at {key}" for key in ("rank0", "verdict")
    ]
    pulse(ours)  # it posts its page anew
    assert "rank 0 issued reduce_scatter sum of 24 bytes for b/grads" in pulse(other)[0]
    watched.close()


def test_a_call_that_one_rank_makes_alone_is_named_before_its_collectives():
    watched = Watched(2)
    watched.ranks[1].note_call("zeroshard.save")
    for comm in watched.ranks:
        comm.barrier()
    assert all(event.wait(600) for event in watched.heard)
    watched.close()
    line = "rank 0 issued barrier of 0 bytes for no unit, rank 1 issued the call zeroshard.save"
    line += "; every rank has to call zeroshard.save"
    assert watched.told == [[f"ranks diverged at operation 0: {line}"]] * 2


@pytest.fixture
def elsewhere(clock, monkeypatch):
    """Three ranks: rank 0 has saved alone and waits, and the others are where the test says, for 20 s."""
    lines = []
    watched = Watched(3, stall_s=8.0, on_wait=lines.append)

    def go(*places):
        watched.ranks[0].note_call("zeroshard.save")
        with watched.ranks[0].waiting():
            for _ in range(20):
                clock.now += 1.0
                for comm, place in zip(watched.ranks[1:], places, strict=True):
                    monkeypatch.setattr(sentinel, "place_of_main_thread", lambda place=place: place)
                    assert pulse(comm) is None
                if (fault := pulse(watched.ranks[0])) is not None:
                    return fault[0], lines
        return "", lines

    yield go
    watched.close()


AT_DATA, AT_BARRIER = Place("train.py:7, in batches", ""), Place("train.py:9, in main", "barrier")


def test_a_rank_that_does_other_work_is_named_once_by_whom_it_keeps_waiting(elsewhere):
    fault, lines = elsewhere(AT_DATA, AT_BARRIER)
    what = "rank 0 issued the call zeroshard.save as operation 0, rank 1 has not and is at train.py:7, in batches"
    assert (fault, lines) == ("", [f"waiting for 9 s (and 1 more): {what}"])


def test_if_all_others_are_in_collectives_of_torch_none_can_go_on(elsewhere):
    fault, _ = elsewhere(AT_BARRIER, AT_BARRIER)
    at = "rank 1 has not and is in torch.distributed.barrier at train.py:9, in main"
    assert fault == f"ranks diverged: rank 0 issued the call zeroshard.save as operation 0, {at}"


def test_gloos_thread_says_that_a_message_of_another_operation_came(clock, monkeypatch):
    watched = Watched(2)
    pulse(watched.ranks[0])
    monkeypatch.setattr(clock, "sleep", lambda seconds: pulse(watched.ranks[0]))
    watched.ranks[1]._watch.met_another.set()
    fault, found_here = pulse(watched.ranks[1])
    watched.close()
    assert fault.startswith("ranks diverged: rank 1 got a message of another operation at ")
    assert found_here


def test_operations_of_another_order_or_kind_differ():
    pages = []
    for calls in (["x", "y", "z"], ["x", "z", "y"]):
        comm = SentinelCommunicator(NullCommunicator(3), MemoryBoard(), lambda line, found_here: None)
        work(comm, calls)
        pages.append(comm._watch.log.recent())
        comm.close()
    assert first_difference(pages[0], pages[0]) is None
    place, one, other = first_difference(*pages)
    assert (place, "y/grads" in one, "z/grads" in other) == (1, True, True)


def test_a_difference_that_has_left_the_page_is_seen_in_all_that_follows(monkeypatch):
    monkeypatch.setattr(sentinel, "REMEMBERED", 3)
    pages = []
    for calls in (["x", "a", "b", "c", "d"], ["y", "a", "b", "c", "d"]):
        comm = SentinelCommunicator(NullCommunicator(3), MemoryBoard(), lambda line, found_here: None)
        work(comm, calls)
        pages.append(comm._watch.log.recent())
        comm.close()
    assert [line for _, _, line in pages[0]] == [line for _, _, line in pages[1]]
    assert first_difference(*pages) == (pages[0][0][0], pages[0][0][2], pages[1][0][2])


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"


def test_what_torch_s_own_collectives_raise_is_named_as_ours_are():
    watched = Watched(3)
    for comm in watched.ranks:
        work(comm, ["blocks.0"])
    watched.ranks[1].close()  # it is gone
    around = ObservedCommunicator(watched.ranks[0])
    named = sentinel.peer_error_of(around, RuntimeError(GLOO))
    assert str(named).startswith("rank 1 is gone")
    watched.ranks[0].close()
    watched.ranks[2].close()


@pytest.mark.parametrize(
    "error", [RuntimeError(GLOO), dist.DistNetworkError("Connection reset"), dist.DistStoreError()]
)
def test_without_a_sentinel_it_is_a_peer_all_the_same(error):
    error.args = error.args or ("wait timeout",)
    assert "a collective failed: a peer was lost or never came (" in str(sentinel.peer_error_of(None, error))


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), PeerError("rank 1")])
def test_other_errors_stay_what_they_are(error):
    assert sentinel.peer_error_of(None, error) is None


class _Counting(MemoryBoard):
    def __init__(self):
        super().__init__()
        self.num_reads = 0

    def read(self, key):
        self.num_reads += 1
        return super().read(key)


@pytest.fixture
def stalled(monkeypatch):
    """`stalled(n)`: sentinels of n ranks that all wait, on a board that counts; their pulses are the test's to give."""
    monkeypatch.setattr(sentinel, "PULSE_S", 1e6)
    monkeypatch.setattr(sentinel, "LOST_AFTER_S", 1e6)
    made = []

    def make(world_size):
        board = _Counting()
        made.append(Watched(world_size, board, stall_s=0.0))
        for comm in made[-1].ranks:
            comm._watch._waiting_since = -1e9
        return board, [comm._watch for comm in made[-1].ranks]

    yield make
    for watched in made:
        watched.close()


@pytest.mark.redundant
def test_a_stall_asks_a_store_for_a_number_of_pages_that_grows_with_the_ranks_and_not_with_their_square(stalled):
    reads = {}
    for world_size in (8, 48, 96):
        board, watches = stalled(world_size)
        for _ in range(6):  # as many as it takes for all to have looked at all
            for watch in watches:
                assert watch._look() is None
        reads[world_size] = board.num_reads / 6 / world_size  # a rank and pulse
    assert reads[8] <= 2 + 2 * 8
    assert reads[48] <= reads[96] <= 2 + 2 * (1 + 2 * sentinel.NEIGHBOURS + sentinel.FULL_LOOK)


@pytest.mark.redundant(but=["1"])
@pytest.mark.parametrize("silent", [0, 1, 20, 39])
def test_in_a_large_world_a_silent_ranks_neighbours_notice_it(stalled, monkeypatch, silent):
    _, watches = stalled(40)
    for watch in watches:
        watch._look()
    monkeypatch.setattr(sentinel, "LOST_AFTER_S", -1.0)
    monkeypatch.setattr(sentinel, "FULL_LOOK", 1)  # a look at all ranks comes once in 40 pulses
    near = [watches[(silent + offset) % 40] for offset in (-2, -1, 1, 2)]
    for watch in near:
        assert silent in watch._near()
        assert watch._lost([silent]) == f"rank {silent} has not answered for -1 s: it is stopped or lost"


def test_in_a_large_world_all_ranks_name_whom_its_neighbours_found_silent(stalled, monkeypatch):
    _, watches = stalled(40)
    for watch in watches:
        watch._post()
    monkeypatch.setattr(sentinel, "PULSE_S", 0.01)
    fault = watches[21]._name_fault()
    assert fault is not None
    assert fault.startswith("rank ")
    assert watches[5]._name_fault() == fault
