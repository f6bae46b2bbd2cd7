"""Finding the first number that is not finite: the ways in which it may not touch the rest of the process."""

import torch
from torch import nn

from zeroshard.comm import run_threads
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


def test_ranks_that_search_find_one_module_and_leave_the_compiler_on():
    compiled = []

    def go(comm):
        model = nn.Linear(2, 2)

        def replay():
            compiled.append(num_compiled())
            model(torch.full((1, 2), torch.inf if comm.rank == 1 else 1.0))

        return first_not_finite(model, comm, replay)

    assert run_threads(go, 2) == ["the output of the model (Linear) on rank 1"] * 2
    assert compiled == [0, 0]
    assert num_compiled() == 1
