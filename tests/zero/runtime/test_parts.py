"""Models that call the modules inside of a unit, and not the unit; and a communicator that delivers late."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from late import late
from nets import (
    NOTHING_RANDOM,
    Net,
    Turn,
    assert_every_stage_equals_one_process,
    backward,
    linear,
    one_process,
    rows,
    train,
)
from zeroshard.comm import NullCommunicator, run_threads
from zeroshard.zero import STAGES, MixedPrecision, Zero
from zeroshard.zero.core.weights import WeightState


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = linear(), linear()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.down(torch.tanh(self.up(x)))

    def without_scale(self, x):
        return self.down(torch.tanh(self.up(x)))


def by_parts(net, x):
    for block in net.blocks:
        x = torch.tanh(block.down(block.up(x)))
    return x


def by_a_method(net, x):
    for block in net.blocks:
        x = torch.tanh(block.without_scale(x))
    return x


def some_by_parts(net, x):
    x = net.blocks[0](x)
    x = torch.tanh(net.blocks[1].up(x))
    return net.blocks[2](x) + net.blocks[1].down(net.blocks[0].up(x))


def recomputed(net, x):
    for block in net.blocks:
        x = torch.tanh(checkpoint(block.without_scale, x, use_reentrant=False, **NOTHING_RANDOM))
    return x


def read(net, x):
    """Weights are read past their modules: of a block that is not called, of one that was, and for zeros."""
    x = net.blocks[0](x)
    x = torch.tanh(F.linear(x, net.blocks[1].up.weight, net.blocks[1].up.bias))
    unused = sum(param.sum() for param in net.blocks[2].parameters())
    return x * net.blocks[0].scale + 0 * unused + net.blocks[1].down.bias.square().sum()


def read_and_recomputed(net, x):
    for block in net.blocks:
        x = torch.tanh(checkpoint(F.linear, x, block.up.weight, use_reentrant=False, **NOTHING_RANDOM))
        inside = lambda x, block=block: F.linear(x, block.down.weight, block.down.bias)  # noqa: E731
        x = torch.tanh(checkpoint(inside, x, use_reentrant=False, **NOTHING_RANDOM))
    return x


PATHS = [by_parts, by_a_method, some_by_parts, recomputed, read, read_and_recomputed]


def evaluating(turn: Turn) -> None:
    with torch.no_grad():
        turn.loss()
    backward(turn)
    with torch.no_grad():
        turn.loss()


@pytest.mark.redundant(but=["3-read-0"])
@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stage", STAGES)
def test_parts_of_a_unit_may_be_called_in_its_place(stage, path, prefetch):
    build = lambda: Net(block=Block, path=path)  # noqa: E731
    expected = one_process(build)
    kwargs = {"stage": stage, "prefetch": prefetch}
    for found in run_threads(lambda comm: train(late(comm), build, evaluating, kwargs), 2, timeout_s=120):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.redundant(but=["3-read"])
@pytest.mark.parametrize("path", [read, read_and_recomputed])
@pytest.mark.parametrize("stage", STAGES)
def test_weights_may_be_read_past_their_modules_right_after_a_step(stage, path):
    build = lambda: Net(block=Block, path=path)  # noqa: E731
    expected = one_process(build)
    for found in run_threads(lambda comm: train(late(comm), build, backward, {"stage": stage}), 2, timeout_s=120):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_weights_of_units_whose_parts_were_called_are_freed_after_backward_and_after_an_evaluation():
    net = Net(block=Block, path=by_parts)
    zero = Zero(net, 3, comm=NullCommunicator(2))

    def allocated():
        return [any(group.params.state is not WeightState.SHARDED for group in unit.groups) for unit in zero.units]

    for _ in range(2):
        loss = net(rows(0)).sum()
        assert allocated() == [True] * 4
        loss.backward()
        assert allocated() == [False] * 4
        with torch.no_grad():
            net(rows(0))
        assert allocated() == [False] * 4


@pytest.mark.parametrize("stage", [1, 2])
def test_a_view_from_before_the_step_is_refused_in_backward(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        views = [net.blocks[1].weight[:]]
        net.path = lambda net, x: torch.tanh(F.linear(net.blocks[0](x), views[0]))
        net(rows(comm.rank)).sum().backward()  # nothing was on its way
        optim.step()
        optim.zero_grad()
        loss = net(rows(comm.rank)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    run_threads(go, 2)


@pytest.mark.redundant
@pytest.mark.filterwarnings("ignore:model. weights are read outside of forward and backward:UserWarning")
@pytest.mark.parametrize("skipped", [1, 2])
def test_a_loss_may_name_parameters_of_a_block_that_is_not_called(skipped):
    """So DDP's users keep gradients from being None; the terms are zeros, or NaN where weights are sharded by then."""

    def take_turn(turn: Turn) -> None:
        loss = turn.loss(skip={skipped})
        (loss + 0 * sum(param.sum() for param in turn.model.blocks[skipped].parameters())).backward()

    assert_every_stage_equals_one_process(Net, take_turn, num_steps=3)


def every_stage_late(comm, build, take_turn, kwargs):
    return [train(late(comm), build, take_turn, {"stage": stage} | kwargs) for stage in STAGES]


@pytest.mark.redundant
@pytest.mark.parametrize(
    "kwargs",
    [
        {"prefetch": 0},
        {"prefetch": 3},
        {"precision": MixedPrecision(torch.bfloat16, torch.bfloat16)},
        {"shard_size": 2, "stage": 1},
        {"shard_size": 2, "stage": 3},
    ],
)
def test_nothing_is_read_before_it_is_there(kwargs):
    """With gradients that are reduced twice, too: what is on its way is neither read nor written."""

    def take_turn(turn: Turn) -> None:
        for _ in range(2):
            turn.model(rows(turn.rank, turn.step)).float().square().mean().backward()

    world_size = 4 if "shard_size" in kwargs else 2
    on_time = run_threads(lambda comm: train(comm, Net, take_turn, {"stage": 2} | kwargs), world_size)
    for found in run_threads(lambda comm: every_stage_late(comm, Net, take_turn, kwargs), world_size):
        for weights in found:
            assert all(torch.equal(weights[name], on_time[0][name]) for name in weights)


@pytest.mark.redundant(but=["0-None"])
@pytest.mark.parametrize(("stage", "shard_size"), [*((stage, None) for stage in STAGES), (1, 1), (2, 1), (3, 1)])
def test_parts_may_be_called_where_another_dtype_computes_and_nothing_is_sharded(stage, shard_size):
    """There weights are whole, but older than their masters after each step."""

    def go(comm):
        net = Net(block=Block, path=by_parts)
        zero = Zero(net, stage, comm=comm, precision=MixedPrecision(torch.bfloat16), shard_size=shard_size)
        optim = zero.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(2):
            net(rows(comm.rank)).float().sum().backward()
            optim.step()
            optim.zero_grad()
            with torch.no_grad():  # a part by itself, before the next forward
                found = net.blocks[0].up(rows(0).bfloat16()), net.first(rows(1).bfloat16())
        with zero.full_params(), torch.no_grad():
            expected = net.blocks[0].up(rows(0).bfloat16()), net.first(rows(1).bfloat16())
        return [torch.equal(ours, full) for ours, full in zip(found, expected, strict=True)]

    assert run_threads(go, 2 if shard_size else 1) == [[True, True]] * (2 if shard_size else 1)


class Adds(nn.Module):
    """Backward does not read the weight, so it may be changed before."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(9, 6))

    def forward(self, x):
        return x + self.rows.sum(0)


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Adds()

    def forward(self, x):
        return self.part(x)


def by_held_parts(net, x):
    for block in net.blocks:
        x = block.part(x)
    return x


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_written_into_weights_of_parts_before_backward_is_kept(stage):
    """At stage 3 they stay unsharded until backward, and other ranks may have freed theirs: they are gathered again."""

    def go(comm):
        net = Net(block=Holds, path=by_held_parts)
        zero = Zero(net, stage, units=net.blocks, comm=comm)
        before = zero.state_dict()
        loss = net(rows(comm.rank)).sum()
        with torch.no_grad():
            for block in net.blocks:
                block.part.rows.mul_(2)
        loss.backward()
        return before, zero.state_dict()

    for before, after in run_threads(go, 2):
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor * (2 if "rows" in name else 1)), name


def _in_a_block_that_drops(comm, stage):
    """The state before, the weights during, and the state after a block with a write and a backward."""
    net = Net(block=Holds, path=by_held_parts)
    zero = Zero(net, stage, units=net.blocks, comm=comm)
    before = zero.state_dict()
    with zero.full_params():
        with torch.no_grad():
            for block in net.blocks:
                block.part.rows.add_(1)
        loss = net(rows(comm.rank)).sum()
        loss.backward()
        during = [block.part.rows.detach().clone() for block in net.blocks]
    return before, during, zero.state_dict()


@pytest.mark.filterwarnings(r"ignore:full_params\(\). weights were written to in this block")
def test_what_is_written_for_a_block_stays_in_it_when_parts_run_there():
    for before, during, after in run_threads(lambda comm: _in_a_block_that_drops(comm, 3), 2):
        for index, found in enumerate(during):
            assert torch.equal(found, before[f"blocks.{index}.part.rows"] + 1)
        for name, tensor in before.items():
            assert torch.equal(after[name], tensor), name
