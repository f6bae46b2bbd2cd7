"""What goes wrong on one rank, or differs between two, every rank hears of."""

import threading

import pytest

from zeroshard.comm import LocalCommunicator, ObservedCommunicator, PeerError, RingCommunicator, agree, run_threads
from zeroshard.comm.agree import agreement, first_rank_does, gather_bytes, maxima, of_first_rank, send_bytes
from zeroshard.host.errors import FirstRankStorageError, UserError


def _outcome(comm, lines, error=None):
    try:
        with agreement(comm) as described:
            described += lines
            if error is not None:
                raise error
    except Exception as caught:  # noqa: BLE001 -- it is what is tested
        return caught
    return None


def test_ranks_that_agree_go_on_after_one_message():
    def go(comm):
        observed = ObservedCommunicator(comm)
        return _outcome(observed, ["a", "b"]), [record.op for record in observed.records]

    assert run_threads(go, 3) == [(None, ["all_gather"])] * 3


def test_ranks_take_the_maximum_of_each_number_or_those_of_rank_0():
    def go(comm):
        numbers = [comm.rank, 2 - comm.rank, 0]
        return maxima(comm, numbers), maxima(comm, []), of_first_rank(comm, numbers)

    assert run_threads(go, 3) == [([2, 2, 0], [], [0, 2, 0])] * 3


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([["a", "b"], ["a", "b"], ["a", "c"]], "params: rank 0 has b, rank 2 has c; give every rank the same"),
        ([["a", "b"], ["a"], ["a", "b"]], "params: rank 0 has b, rank 1 has nothing more; give every rank the same"),
    ],
)
def test_the_first_difference_is_named_on_every_rank(lists, message):
    for error in run_threads(lambda comm: _outcome(comm, lists[comm.rank]), 3):
        assert type(error) is ValueError
        assert str(error).startswith(message)


@pytest.mark.parametrize(
    ("raised", "heard"),
    [(TypeError, TypeError), (ValueError, ValueError), (OSError, OSError), (KeyError, RuntimeError)],
)
def test_an_error_of_one_rank_is_every_ranks(raised, heard):
    mine = raised("what is wrong")
    one, two, three = run_threads(lambda comm: _outcome(comm, [], mine if comm.rank == 1 else None), 3)
    assert two is mine
    assert type(one) is type(three) is heard
    assert str(one) == str(three) == f"rank 1: {mine}"
    first, *_ = run_threads(lambda comm: _outcome(comm, [], mine if comm.rank == 0 else None), 3)
    assert first is mine


def test_each_rank_raises_its_own():
    errors = [ValueError("zero"), TypeError("one")]
    assert run_threads(lambda comm: _outcome(comm, [], errors[comm.rank]), 2) == errors


def test_alone_there_is_nobody_to_ask():
    error = ValueError("here")
    assert _outcome(LocalCommunicator(), ["a"], error) is error
    assert _outcome(LocalCommunicator(), ["a"]) is None


def test_only_the_first_rank_works_and_the_others_wait_for_it():
    done = threading.Event()
    workers = []

    def rank_main(comm):
        def work():
            workers.append(comm.rank)
            done.set()

        first_rank_does(comm, work)
        return done.is_set()

    assert run_threads(rank_main, 3) == [True] * 3
    assert workers == [0]


def test_a_users_mistake_is_the_same_error_on_every_rank():
    def fail():
        raise UserError("data.path", "'ä.txt' is not there", "give another")

    def rank_main(comm):
        with pytest.raises(UserError) as caught:
            first_rank_does(comm, fail)
        return str(caught.value)

    assert set(run_threads(rank_main, 3)) == {"data.path: 'ä.txt' is not there; give another"}


def test_any_other_failure_leaves_no_rank_waiting():
    def rank_main(comm):
        with pytest.raises((ZeroDivisionError, RuntimeError), match="division by zero"):
            first_rank_does(comm, lambda: 1 / 0)

    run_threads(rank_main, 2)
    with pytest.raises(ZeroDivisionError):
        first_rank_does(LocalCommunicator(), lambda: 1 / 0)


@pytest.mark.parametrize("telling", ["largest", "send_bytes", "first_other"])
def test_a_peer_that_is_lost_meanwhile_does_not_hide_a_ranks_own_error(telling, monkeypatch):
    def lose(*args):
        raise PeerError("a peer is lost")

    monkeypatch.setattr(agree, telling, lose)
    if telling == "first_other":
        assert isinstance(_outcome(LocalCommunicator(), [], ZeroDivisionError()), ZeroDivisionError)
        return
    with pytest.raises(ZeroDivisionError):
        first_rank_does(LocalCommunicator(), lambda: 1 / 0)


def test_a_rank_zero_that_works_for_long_is_not_taken_for_lost(monkeypatch):
    monkeypatch.setattr(agree, "STILL_AT_IT_S", 0.01)
    heard, arrived = threading.Semaphore(0), []

    def rank_main(comm):
        if comm.rank == 0:
            first_rank_does(comm, lambda: arrived.extend(heard.acquire(timeout=600) for _ in range(3)))
            return
        all_reduce = comm.all_reduce

        def counted(*args, **kwargs):
            heard.release()
            return all_reduce(*args, **kwargs)

        comm.all_reduce = counted
        first_rank_does(comm, lambda: None)

    run_threads(rank_main, 2)
    assert arrived == [True] * 3


def test_a_disk_that_fails_on_rank_zero_is_told_there_alone():
    def fail():
        raise OSError(28, "No space left on device")

    def rank_main(comm):
        with pytest.raises(OSError, match="No space left on device") as caught:
            first_rank_does(comm, fail)
        return type(caught.value)

    assert run_threads(rank_main, 3) == [OSError, FirstRankStorageError, FirstRankStorageError]


def _gathered(comm):
    mine = [b"", b"\0x", bytes(range(256)) * 1000][comm.rank % 3]
    ring = RingCommunicator()
    found = [gather_bytes(each, mine) for each in (comm, ring)]
    ring.close()
    return found[0] == found[1] and found[0]


@pytest.mark.redundant
def test_bytes_of_any_length_are_gathered_by_every_rank(gloo_ranks):
    wanted = [b"", b"\0x", bytes(range(256)) * 1000]
    assert gloo_ranks(3).run(_gathered) == [wanted] * 3
    assert run_threads(lambda comm: gather_bytes(comm, wanted[comm.rank]), 3) == [wanted] * 3
    assert run_threads(lambda comm: gather_bytes(comm, b""), 2) == [[b"", b""]] * 2
    assert gather_bytes(LocalCommunicator(), b"ab") == [b"ab"]
    assert run_threads(lambda comm: send_bytes(comm, b"rank %d" % comm.rank, 1), 3) == [b"rank 1"] * 3
    assert run_threads(lambda comm: send_bytes(comm, b"", 0), 2) == [b""] * 2
