"""Classes around and below a communicator, as users write them."""

import torch
from torch import nn

from zeroshard import Zero
from zeroshard.comm import NullCommunicator, ObservedCommunicator, RingCommunicator, run_threads, thread_transports


def _step(comm):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zero = Zero(model, stage=2, units=list(model), comm=comm)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    model(torch.ones(2, 8)).sum().backward()
    optim.step()


def test_the_engine_calls_the_reduce_scatter_of_a_subclass():
    """Though the class that it extends has another for inputs that nobody reads afterwards."""
    transports = thread_transports(2, timeout_s=60)

    class Counting(RingCommunicator):
        num_calls = 0

        def reduce_scatter(self, output, input, op="sum"):
            self.num_calls += 1
            return super().reduce_scatter(output, input, op)

    def on_rank(comm):
        ring = Counting(transport=transports[comm.rank])
        _step(ring)
        ring.close()
        return ring.num_calls

    assert run_threads(on_rank, 2) == [2, 2]


def test_the_engine_calls_a_reduce_scatter_that_was_put_into_an_instance():
    calls, comm = [], ObservedCommunicator(NullCommunicator(2))
    inner = comm.reduce_scatter
    comm.reduce_scatter = lambda *args: (calls.append(args), inner(*args))[1]
    _step(comm)
    assert len(calls) == 2
