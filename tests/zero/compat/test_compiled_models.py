"""`torch.compile` of blocks and of whole models: what is in the graphs, and that hooks are outside of them."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from nets import Net, recomputed
from zeroshard.comm.backends.null import NullCommunicator
from zeroshard.zero import MixedPrecision, Zero

NUM_BLOCKS = 9  # more than dynamo allows variants of one function
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf", "ignore:.*script_method.* is deprecated"
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(6), nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def by_parts(net, x):
    for block in net.blocks:
        x = x + torch.tanh(block.linear(block.norm(x)))
    return x


class Counts:
    """A backend that counts graphs; dynamo's own counters have the rest."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    @property
    def breaks(self) -> int:
        return sum(torch._dynamo.utils.counters["graph_break"].values())


def forwards(net, backend):
    for block in net.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    return net


def blocks(net, backend):
    for block in net.blocks:
        block.compile(backend=backend, fullgraph=True)
    return net


def model(net, backend):
    return torch.compile(net, backend=backend)


def whole(net, backend):
    return torch.compile(net, backend=backend, fullgraph=True)


def whole_forward(net, backend):
    net.forward = torch.compile(net.forward, backend=backend, fullgraph=True)
    return net


def in_place(net, backend):
    net.compile(backend=backend)
    return net


def trained(stage, compiles=None, before=False, num_ranks=2, num_blocks=NUM_BLOCKS, dtype=None, changes=None, **kwargs):
    """Losses of four steps and the last weights; graphs after each step and after an evaluation; breaks.

    ``changes``: what becomes of the weights after each step.
    """
    torch.manual_seed(0)
    net, counts = Net(num_blocks, Block, **kwargs), Counts()
    called = net
    if compiles and before:
        called = compiles(net, counts)
    precision = MixedPrecision(dtype)
    zero = Zero(net, stage, comm=NullCommunicator(num_ranks), units=list(net.blocks), precision=precision)
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    if compiles and not before:
        called = compiles(net, counts)
    losses, graphs = [], []
    for step in range(4):
        loss = called(torch.ones(4, 6) * step).float().square().mean()
        loss.backward()
        optim.step()
        optim.zero_grad()
        if changes is not None:
            changes(zero)
        losses.append(loss.item())
        graphs.append(counts.graphs)
    with torch.no_grad():
        losses.append(called(torch.ones(4, 6)).mean().item())
    graphs.append(counts.graphs)
    return (losses, zero.state_dict()), graphs, counts.breaks


def same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], weight) for name, weight in expected[1].items())


@pytest.mark.pairwise("compiles", "before")
@pytest.mark.parametrize("path", [None, recomputed], ids=["", "recomputed"])
@pytest.mark.parametrize("before", [False, True], ids=["after Zero", "before Zero"])
@pytest.mark.parametrize("compiles", [forwards, blocks])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_compiled_blocks_are_one_graph_without_a_break(stage, compiles, before, path):
    kwargs = {"path": path} if path else {}
    expected, _, _ = trained(stage, **kwargs)
    found, graphs, breaks = trained(stage, compiles, before, **kwargs)
    same(found, expected)
    assert graphs == [1, 1, 1, 1, 2]  # the second without gradients
    assert breaks == 0


def written(zero):
    with zero.full_params(write_back=True), torch.no_grad():
        for param in zero.model.parameters():
            param.mul_(0.5)


def loaded(zero):
    zero.load_state_dict({name: value * 0.5 for name, value in zero.state_dict().items()})


def called_in_part(zero):
    """A block alone, after a step: in 16 bits its weights are older than their masters until it is called."""
    block = zero.model.blocks[1]
    with torch.no_grad():
        assert not block(torch.ones(4, 6, dtype=block.linear.weight.dtype)).isnan().any()


@pytest.mark.parametrize(
    ("stage", "compiles", "before", "path", "dtype", "changes"),
    [
        (0, in_place, False, None, torch.bfloat16, written),
        (1, whole, True, None, None, None),
        (2, whole_forward, False, None, None, loaded),
        (3, whole, True, recomputed, torch.bfloat16, called_in_part),
    ],
)
def test_on_one_rank_a_compiled_model_is_one_graph_of_current_weights(stage, compiles, before, path, dtype, changes):
    kwargs = {"num_ranks": 1, "num_blocks": 3, "dtype": dtype, "changes": changes, **({"path": path} if path else {})}
    expected, _, _ = trained(stage, **kwargs)
    found, graphs, _ = trained(stage, compiles, before, **kwargs)
    same(found, expected)
    assert graphs == [1, 1, 1, 1, 2]  # the second without gradients


@pytest.mark.redundant(but=["3-in_place"])
@pytest.mark.pairwise("compiles")
@pytest.mark.parametrize("compiles", [model, in_place])
@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_model_has_a_graph_for_the_blocks_and_for_each_layer_around_them(stage, compiles):
    expected, _, _ = trained(stage)
    found, graphs, breaks = trained(stage, compiles)
    same(found, expected)
    assert graphs == [3, 3, 3, 3, 6]
    assert breaks <= 2  # before the first block: where the model calls its path, and where the path calls the block


def test_parts_of_units_that_a_compiled_model_calls_have_their_weights():
    expected, _, _ = trained(3, path=by_parts)
    found, graphs, _ = trained(3, model, path=by_parts)
    same(found, expected)
    assert graphs[1:4] == graphs[1:2] * 3


@pytest.mark.redundant
def test_a_compiled_step_is_right_and_leaves_hooks_alone():
    """Backward's hooks and the optimizer's run where dynamo is listening."""
    found = []
    for compiled in (False, True):
        net, counts = Net(2, Block), Counts()
        zero = Zero(net, 3, comm=NullCommunicator(2), units=list(net.blocks))
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)

        def step(x, net=net, optim=optim):
            loss = net(x).square().mean()
            loss.backward()
            optim.step()
            optim.zero_grad()
            return loss

        run = torch.compile(step, backend=counts) if compiled else step
        losses, graphs = [], []
        for index in range(3):
            losses.append(run(torch.ones(4, 6) * index).item())
            graphs.append(counts.graphs)
        found.append((losses, zero.state_dict()))
    same(found[1], found[0])
    assert graphs == graphs[:1] * 3
    assert 0 < graphs[0] <= 6


def test_a_compiled_optimizer_step_is_one_graph():
    net, counts = Net(2), Counts()
    zero = Zero(net, 3, comm=NullCommunicator(2), units=list(net.blocks))
    optim = zero.optimizer(torch.optim.SGD, lr=0.1)
    optim.step = torch.compile(optim.step, backend=counts)
    for _ in range(3):
        net(torch.ones(4, 6)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    assert (counts.graphs, counts.breaks) == (1, 0)


def test_one_graph_of_a_whole_model_is_refused_with_the_way_out():
    net = Net(2)
    Zero(net, 3, comm=NullCommunicator(2), units=list(net.blocks))
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match=r"leave fullgraph out, or compile blocks instead, by block"
    ):
        torch.compile(net, backend="eager", fullgraph=True)(torch.ones(4, 6))


@pytest.mark.parametrize("in_step", [False, True])
def test_compiled_autograd_is_refused_in_backward(in_step):
    """It drops calls that were asked for at the end of a backward by hooks that are not compiled."""
    net = Net(2)
    Zero(net, 2, comm=NullCommunicator(2), units=list(net.blocks))

    def step(x):
        net(x).sum().backward()

    with ExitStack() as stack:
        if in_step:
            stack.enter_context(torch._dynamo.config.patch(compiled_autograd=True))
            step = torch.compile(step, backend="eager")
        else:
            stack.enter_context(torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")))
        with pytest.raises(RuntimeError, match=r"^backward: compiled autograd does not .*compiled_autograd off"):
            step(torch.ones(4, 6))
