from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zeroshard.kernels.launch import (
    on_its_device,
    opaque,
)


@opaque("doubled_for_a_test", "out")
def doubled(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.from_numpy(x.numpy() * 2))  # which no compiler looks into


def test_a_launcher_is_a_plain_call_and_one_node_when_compiled():
    x = torch.arange(3.0)

    def run(x):
        y = torch.empty_like(x)
        doubled(x + 1, y)
        return y - 1

    nodes = []

    def backend(graph, inputs):
        nodes.extend(node.target for node in graph.graph.nodes)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(run, backend=backend, fullgraph=True)
    assert torch.equal(compiled(x), (x + 1) * 2 - 1)
    assert torch.equal(run(x), compiled(x))
    assert "zeroshard.doubled_for_a_test.default" in [str(node) for node in nodes]


@pytest.mark.skipif(0 < torch.cuda.device_count() < 3, reason="a fake tensor on cuda:2 needs three GPUs, or none")
def test_a_launch_is_on_the_device_of_its_tensors_whichever_is_current(monkeypatch):
    """Without the guard a kernel of cuda:1's tensors would be launched on cuda:0."""
    current = [0]

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    monkeypatch.setattr("torch.cuda.current_device", lambda: current[0])
    monkeypatch.setattr("torch.cuda.device", device)
    launched = []
    launch = on_its_device(lambda *args: launched.append(current[0]))
    with FakeTensorMode():
        for where in ("cuda:1", "cpu", "cuda:0", "cuda:2"):
            launch(3, torch.empty(2, device=where), torch.empty(2, device=where))
    assert launched == [1, 0, 0, 2]
    assert current == [0]
