"""What goes wrong on one rank, or differs between two, every rank hears of."""

from __future__ import annotations

import pytest

from zeroshard.comm import LocalCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero.sharded_optimizer.argument_check import agreement


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
    ("raised", "heard"), [(TypeError, TypeError), (ValueError, ValueError), (KeyError, RuntimeError)]
)
def test_an_error_of_one_rank_is_every_ranks(raised, heard):
    mine = raised("what is wrong")
    one, two, three = run_threads(lambda comm: _outcome(comm, [], mine if comm.rank == 1 else None), 3)
    assert two is mine
    assert type(one) is type(three) is heard
    assert str(one) == str(three) == f"rank 1: {mine}"


def test_each_rank_raises_its_own():
    errors = [ValueError("zero"), TypeError("one")]
    assert run_threads(lambda comm: _outcome(comm, [], errors[comm.rank]), 2) == errors


def test_alone_there_is_nobody_to_ask():
    error = ValueError("here")
    assert _outcome(LocalCommunicator(), ["a"], error) is error
    assert _outcome(LocalCommunicator(), ["a"]) is None
