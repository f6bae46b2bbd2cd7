"""The core's passes and hooks alone, over plain groups: stages 0-3 train, accumulate, and let a rank skip a unit."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from nets import Net, rows
from zeroshard.comm import CONTROL, Communicator, LocalCommunicator, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.zero.core.hooks import UnitHooks, take_gradients
from zeroshard.zero.core.passes import Passes
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import STAGES
from zeroshard.zero.core.units import Group, Unit


def engine(comm: Communicator, net: Net, stage: int) -> Passes[Unit, Group]:
    """Hook the net's blocks, and the net itself with what else it has."""
    groups, strategy = RankGroups(comm, comm, LocalCommunicator()), STAGES[stage]

    def unit(name: str, module: nn.Module, params: list[tuple[str, nn.Parameter]]) -> Unit:
        return Unit(name, module, [Group.of(name, params, strategy, groups, Precision())])

    rest = [(name, param) for name, param in net.named_parameters() if not name.startswith("blocks")]
    root, *blocks = (
        unit("root", net, rest),
        *(unit(str(i), b, [*b.named_parameters()]) for i, b in enumerate(net.blocks)),
    )
    passes = Passes(root, blocks, groups, strategy, prefetch=1)
    for each in passes.all_units():
        UnitHooks(each, passes).attach()
    take_gradients(passes)
    return passes


def step(passes: Passes[Unit, Group]) -> None:
    with torch.no_grad():
        for group in passes.groups():
            for shard in group.shards:
                if shard.grad is not None:
                    shard.sub_(shard.grad, alpha=0.1)
                    shard.grad = None
            group.grads.clear(set(range(len(group.params.params))))
            group.params.mark_stale()


def loss(net: Net, rank: int, number: int, **kwargs) -> Tensor:
    return net(rows(rank, number), **kwargs).square().mean()


def path(net: Net, x: Tensor, order=(0, 1, 2)) -> Tensor:
    for place in order:
        x = torch.tanh(net.blocks[place](x))
    return x


def accumulates(net, rank, number, passes):
    for last in (False, True):
        passes.sync = last
        loss(net, rank, 2 * number + last).backward()
    with torch.no_grad():  # an evaluation in between frees weights, and changes nothing
        loss(net, rank, 0)


def skips(net, rank, number, passes):
    loss(net, rank, number, order=(0, 2) if rank == 1 else (0, 1, 2)).backward()


def calls_again(net, rank, number, passes):
    first = loss(net, rank, number, order=(0, 1, 0, 2))
    with torch.no_grad():
        loss(net, rank, number)
    first.backward()


@pytest.mark.parametrize("take_turn", [accumulates, skips, calls_again])
def test_every_stage_trains_with_the_same_bits_and_as_one_process_does(take_turn):
    def go(comm, stage):
        net = Net(path=path)
        passes = engine(comm, net, stage)
        for number in range(3):
            take_turn(net, comm.rank, number, passes)
            assert all(param.grad is None for param in net.parameters())
            step(passes)
        masters = [(group, group.params.gather_master()) for group in passes.groups()]
        return [view for group, master in masters for view in group.params.layout.views(master)]

    net = Net(path=path)
    for number in range(3):
        for rank in range(2):
            take_turn(net, rank, number, SimpleNamespace())
        with torch.no_grad():
            for param in net.parameters():
                param -= 0.1 * param.grad / 2
                param.grad = None
    found = [weights for stage in STAGES for weights in run_threads(lambda comm, s=stage: go(comm, s), 2)]
    plain = dict(net.named_parameters())
    names = [*(n for n in plain if "blocks" not in n), *(n for n in plain if "blocks" in n)]
    for weights in found:
        for name, ours, first in zip(names, weights, found[0], strict=True):
            assert torch.equal(ours, first), f"{name} has other bits than at stage 0"
            torch.testing.assert_close(ours, plain[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_backwards_that_do_not_reduce_send_no_gradients(stage):
    observed = ObservedCommunicator(NullCommunicator(2))
    net = Net(path=path)
    passes = engine(observed, net, stage)
    passes.sync = False
    loss(net, 0, 0).backward()
    observed.drain()
    loss(net, 0, 1).backward()
    sent = {record.op for record in observed.drain() if record.label != CONTROL}
    assert sent == ({"all_gather"} if stage == 3 else set())
    assert all(group.unreduced for group in passes.groups())
