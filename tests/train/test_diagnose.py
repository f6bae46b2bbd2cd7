"""Finding the first number that is not finite: the ways in which it may not touch the rest of the process."""

from __future__ import annotations

import threading

import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.train.loop.diagnose import first_not_finite


def num_compiled() -> int:
    """How many graphs `torch.compile` makes of one function."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(torch.ones(1))
    return len(graphs)


def test_thread_ranks_that_search_at_once_leave_the_compiler_on():
    """Rank 0 begins, rank 1 begins, rank 0 ends its search, rank 1 ends its own."""
    began = [threading.Event() for _ in range(2)]
    ended = threading.Event()
    compiled = []

    def go(comm):
        model = nn.Linear(2, 2)

        def replay():
            if comm.rank == 1:
                assert began[0].wait(60)
            began[comm.rank].set()
            assert began[1].wait(60)
            if comm.rank == 1:
                assert ended.wait(60)
            compiled.append(num_compiled())
            model(torch.full((1, 2), torch.inf))

        # each alone: together they would end at the same time
        found = first_not_finite(model, LocalCommunicator(), replay)
        if comm.rank == 0:
            ended.set()
        return found

    assert run_threads(go, 2) == ["the output of the model (Linear) on rank 0"] * 2
    assert compiled == [0, 0]
    assert num_compiled() == 1
