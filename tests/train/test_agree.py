import threading

import pytest

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.errors import UserError
from zeroshard.train.agree import first_rank_does


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
