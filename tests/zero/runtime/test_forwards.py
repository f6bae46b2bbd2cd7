"""Several forwards before a backward, and ranks that go ways of their own."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nets import NOTHING_RANDOM, LiveWeights, Net, Turn, assert_every_stage_equals_one_process, rows, units_with_weights
from zeroshard.comm import NullCommunicator, labelled, run_threads
from zeroshard.zero import ShardingStrategy, Zero

KEEP_WEIGHTS = ShardingStrategy("shard", "shard", "shard", reshard_after_forward=False)


def both_at_once(net):
    (net(rows(0)).sum() + net(rows(1)).sum()).backward()


def three_at_once(net):
    sum(net(rows(i)).sum() for i in range(3)).backward()


def one_of_another(net):
    net(net(rows(0))).sum().backward()


def each_by_itself(net):
    first, second = net(rows(0)).sum(), net(rows(1)).sum()
    first.backward()
    second.backward()


def the_last_first(net):
    first, second = net(rows(0)).sum(), net(rows(1)).sum()
    second.backward()
    first.backward()


def first_dropped(net):
    net(rows(0))
    net(rows(1)).sum().backward()


def last_dropped(net):
    first = net(rows(0)).sum()
    net(rows(1))
    first.backward()


def between_two(net):
    first, dropped, last = (net(rows(i)).sum() for i in range(3))
    del dropped
    (first + last).backward()


def with_evaluation(net):
    first = net(rows(0)).sum()
    with torch.no_grad():
        net(rows(1))
    (first + net(rows(2)).sum()).backward()


TURNS = [
    both_at_once,
    three_at_once,
    one_of_another,
    each_by_itself,
    the_last_first,
    first_dropped,
    last_dropped,
    between_two,
    with_evaluation,
]


@pytest.mark.redundant
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("turn", TURNS)
def test_weights_are_gathered_and_freed_for_each_call(turn, prefetch):
    net = Net(8, block=LiveWeights)
    zero = Zero(net, stage=3, comm=NullCommunicator(2), prefetch=prefetch)
    seen = units_with_weights(net, zero)
    for _ in range(2):
        turn(net)
        zero.zero_grad()
    kept_for_backward = 1  # the last unit of a forward, which another forward or backward may begin beside
    assert max(seen) <= prefetch + 1 + kept_for_backward
    net(rows(0))
    assert sum(group.params.full_bytes > 0 for unit in zero.units[1:] for group in unit.groups) == 1


@pytest.mark.redundant
@pytest.mark.pairwise
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("row", [3, KEEP_WEIGHTS])
@pytest.mark.parametrize("turn", TURNS)
def test_several_forwards_are_what_one_process_computes(turn, row, prefetch):
    def take_turn(turn_: Turn) -> None:
        turn(lambda x: turn_.model(x + turn_.rank))

    assert_every_stage_equals_one_process(Net, take_turn, zero_kwargs={"stage": row, "prefetch": prefetch})


@pytest.mark.redundant
@pytest.mark.parametrize("reentrant", [False, True])
def test_several_forwards_may_be_computed_again(reentrant):
    def path(net, x):
        for block in net.blocks:
            x = torch.tanh(checkpoint(block, x, use_reentrant=reentrant, **NOTHING_RANDOM))
        return x

    def take_turn(turn_: Turn) -> None:
        both_at_once(lambda x: turn_.model(x + turn_.rank))

    assert_every_stage_equals_one_process(lambda: Net(path=path), take_turn)


ORDERS = [(2, 0, 1), (1, 2, 0), (0, 1, 2), (2, 1, 0)]


@pytest.mark.redundant(but=["kwargs0"])
@pytest.mark.parametrize("kwargs", [{"prefetch": 0}, {"prefetch": 1}, {"prefetch": 3}, {"stage": KEEP_WEIGHTS}])
def test_ranks_may_run_units_in_different_orders_from_the_first_forward_on(kwargs):
    def take_turn(turn: Turn) -> None:
        turn.loss(order=ORDERS[(turn.rank + turn.step) % 4]).backward()

    assert_every_stage_equals_one_process(Net, take_turn, world_size=3, num_steps=len(ORDERS), zero_kwargs=kwargs)


def test_places_in_the_schedule_are_those_of_rank_0():
    def go(comm):
        net = Net()
        zero = Zero(net, 3, comm=comm)
        net(rows(comm.rank), order=ORDERS[comm.rank]).sum().backward()
        return [unit.name for unit in zero._runtime.order]

    assert run_threads(go, 2) == [["blocks.2", "blocks.0", "blocks.1"]] * 2


class Pairs:
    """Ranks whose gathers are paired by their size alone, as a backend would that compares nothing else."""

    def __init__(self, comm):
        self._comm = comm

    def __getattr__(self, name):
        return getattr(self._comm, name)

    def all_gather(self, output, input):
        with labelled("anything"):
            return self._comm.all_gather(output, input)


def test_calls_that_differ_between_ranks_raise_on_every_rank_and_name_the_unit():
    def go(comm):
        net = Net()
        zero = Zero(net, 3, comm=Pairs(comm), prefetch=0)
        optim = zero.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            net(rows(comm.rank)).sum().backward()
            optim.step()
            optim.zero_grad()
        # A gather more on each rank, of blocks of one size.
        with torch.no_grad():
            net(rows(comm.rank), order=(0, 1, 2, 0) if comm.rank == 0 else (0, 1, 2, 1))
        with pytest.raises(RuntimeError, match=r"^backward: ranks called units .*call units in the same order") as e:
            net(rows(comm.rank)).sum().backward()
        with pytest.raises(RuntimeError, match=r"^step: the last backward ended in an exception"):
            optim.step()
        return str(e.value)

    told = run_threads(go, 2)
    assert "another rank saw it" in told[0]
    assert "this rank called blocks.1, another rank blocks.0" in told[1]


@pytest.mark.redundant
def test_forces_may_be_taken_in_the_middle_of_a_forward():
    """The model's own forward asks for the gradient of what it has computed so far, with and without a graph."""

    class Forces(Net):
        def forward(self, x, create_graph=False):
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                hidden = torch.tanh(self.blocks[0](self.first(x)))
                (slope,) = torch.autograd.grad(hidden.sum(), x, create_graph=create_graph)
            return self.last(self.blocks[1](hidden) + slope)

    def build():
        return Forces(3)

    def take_turn(turn: Turn) -> None:
        with torch.no_grad():
            seen.append(turn.model(rows(turn.rank, 9)).clone())
        turn.model(rows(turn.rank, turn.step), create_graph=True).square().mean().backward()

    seen: list[torch.Tensor] = []
    assert_every_stage_equals_one_process(build, take_turn)
    assert not torch.stack(seen).isnan().any()
