"""Operations run behind the caller, in order, and tell it what went wrong."""

import threading

import pytest
import torch

from zeroshard.comm.queued.worker import Worker


@pytest.fixture
def worker():
    made = Worker("test")
    yield made
    made.close()


def test_an_operation_may_write_into_a_parameter(worker):
    parameter = torch.nn.Parameter(torch.zeros(3))
    worker.submit(lambda: parameter.add_(1)).wait()
    assert parameter.tolist() == [1, 1, 1]


def test_close_finishes_what_was_submitted_and_ends_the_thread():
    worker, seen = Worker("closing"), []
    worker.submit(lambda: seen.append(1))
    worker.close()
    worker.close()
    assert seen == [1]
    assert "closing" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(RuntimeError, match="the communicator is closed"):
        worker.submit(lambda: None)
