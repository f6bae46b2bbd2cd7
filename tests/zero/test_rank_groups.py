"""Groups that shard, replicas of them, and what the engine makes of both."""

import pytest
import torch
from torch import nn

from nets import Net, Turn, backward, muon_and_adamw, one_process, rows, train
from zeroshard.comm import NullCommunicator, labelled, run_threads
from zeroshard.zero import STAGES, FlatLayout, RankGroups, ShardingStrategy, Zero
from zeroshard.zero.core.gradients import Gradients

SHARDING = [1, 2, 3]


def test_neighbours_shard_and_their_counterparts_are_replicas():
    def go(comm):
        rank_groups = RankGroups.of(comm, 2)
        everyone = torch.empty(3), torch.empty(2)
        rank = torch.tensor([float(comm.rank)])
        rank_groups.replicate_group.all_gather(everyone[0], rank)
        rank_groups.shard_group.all_gather(everyone[1], rank)
        return (
            [each.tolist() for each in everyone],
            rank_groups.shard_group.rank,
            rank_groups.replicate_group.rank,
            rank_groups.writes,
        )

    assert run_threads(go, 6) == [
        ([[0.0, 2.0, 4.0], [0.0, 1.0]], 0, 0, True),
        ([[1.0, 3.0, 5.0], [0.0, 1.0]], 1, 0, True),
        ([[0.0, 2.0, 4.0], [2.0, 3.0]], 0, 1, False),
        ([[1.0, 3.0, 5.0], [2.0, 3.0]], 1, 1, False),
        ([[0.0, 2.0, 4.0], [4.0, 5.0]], 0, 2, False),
        ([[1.0, 3.0, 5.0], [4.0, 5.0]], 1, 2, False),
    ]


def test_a_communicator_without_parts_is_refused_by_name():
    class Whole(NullCommunicator):
        split = None

    with pytest.raises(ValueError, match="a Whole cannot be split; give it a method split"):
        Zero(Net(), comm=Whole(4), shard_size=2)


def _on_some_ranks(net: Net, x: torch.Tensor, *, rank: int) -> torch.Tensor:
    """Block 0 on one rank of four, block 1 on the whole second replica, block 2 nowhere."""
    x = torch.tanh(net.blocks[0](x)) if rank == 3 else x
    return torch.tanh(net.blocks[1](x)) if rank >= 2 else x


def _some_ranks(turn: Turn) -> None:
    turn.loss(rank=turn.rank).backward()


def _scattered() -> Net:
    return Net(path=_on_some_ranks)


@pytest.mark.redundant(but=["2-2"])
@pytest.mark.parametrize("shard_size", [1, 2])
@pytest.mark.parametrize("stage", SHARDING)
def test_a_parameter_is_used_if_any_rank_of_any_replica_uses_it(stage, shard_size):
    kwargs = {"stage": stage, "shard_size": shard_size}
    expected = one_process(_scattered, _some_ranks, world_size=4, weight_decay=0.5)
    assert torch.equal(expected["blocks.2.weight"], Net().state_dict()["blocks.2.weight"])
    for weights in run_threads(lambda comm: train(comm, _scattered, _some_ranks, kwargs, weight_decay=0.5), 4):
        for name, whole in expected.items():
            torch.testing.assert_close(weights[name], whole, rtol=0, atol=1e-6)


class _Late(torch.autograd.Function):
    """Adds to a parameter's gradient when backward has passed by the parameter's own unit."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight.detach().clone())
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad, torch.ones_like(weight)


def _late_on_one_rank(net: Net, x: torch.Tensor, *, rank: int) -> torch.Tensor:
    if rank == 1:
        x = _Late.apply(x, net.blocks[2].weight)
    for block in net.blocks:
        x = torch.tanh(block(x))
    return x


@pytest.mark.redundant(but=["stage2-2-local", "2-1-sharded", "1-4-sharded"])
@pytest.mark.pairwise
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("shard_size", [1, 2, 4])
@pytest.mark.parametrize("stage", [1, 2, ShardingStrategy("shard", "shard", "shard", reshard_after_forward=False)])
def test_a_gradient_that_comes_after_its_units_reduction_counts(stage, shard_size, accumulate):
    kwargs = {"stage": stage, "shard_size": shard_size, "accumulate": accumulate}

    def take_turn(turn):
        with turn.zero.micro_batch(last=False):
            turn.loss(rank=turn.rank).backward()
        turn.loss(rank=turn.rank).backward()

    def plain_turn(turn):
        for _ in range(2):
            turn.loss(rank=turn.rank).backward()

    build = lambda: Net(path=_late_on_one_rank)  # noqa: E731 -- as short as what it builds
    expected = one_process(build, plain_turn, world_size=4, optimizer=torch.optim.SGD)
    for weights in run_threads(lambda comm: train(comm, build, take_turn, kwargs, optimizer=torch.optim.SGD), 4):
        for name, whole in expected.items():
            torch.testing.assert_close(weights[name], whole, rtol=0, atol=1e-6)


def test_between_the_two_sums_a_late_gradient_issues_nothing_and_spoils_nothing():
    layout = FlatLayout.of([("a", (4,)), ("b", (4,))], 2)

    def go(comm, stage):
        rank_groups = RankGroups.of(comm, 2)
        dtype = {"reduced_dtype": torch.float32, "reduce_dtype": torch.float32}
        grads = Gradients("unit", layout, STAGES[stage], rank_groups, device=torch.device("cpu"), **dtype)
        grads.accumulate(0, torch.ones(4))
        grads.accumulate(1, torch.ones(4))
        grads.reduce()
        if comm.rank == 3:  # alone: any collective here would wait for ever
            grads.accumulate(1, torch.full((4,), 8.0))
            grads.accumulate(1, torch.full((4,), 8.0))
        grads.issue()
        grads.reduce()
        grads.issue()
        grads.wait_for_reduce()
        return grads.reduced.tolist()

    for stage in SHARDING:
        by_rank = run_threads(lambda comm, stage=stage: go(comm, stage), 4, timeout_s=120)
        assert by_rank == [[1.0] * 4, [5.0] * 4] * 2


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        raise FloatingPointError


def _fails_between_units(net: Net, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
    for index, block in enumerate(net.blocks):
        x = torch.tanh(block(x))
        x = _Fails.apply(x) if fails and index == 0 else x
    return x


@pytest.mark.redundant
@pytest.mark.parametrize("shard_size", [1, 2])
@pytest.mark.parametrize("stage", SHARDING)
def test_a_backward_that_failed_between_the_two_sums_leaves_no_trace(stage, shard_size):
    def take_turn(turn, failing):
        if failing and turn.step == 1:
            with pytest.raises(FloatingPointError):
                turn.loss(fails=True).backward()
            turn.optim.zero_grad()
        turn.loss().backward()

    build = lambda: Net(path=_fails_between_units)  # noqa: E731 -- as short as what it builds
    kwargs = {"stage": stage, "shard_size": shard_size}
    quiet, loud = (
        run_threads(lambda comm, failing=failing: train(comm, build, lambda turn: take_turn(turn, failing), kwargs), 4)
        for failing in (False, True)
    )
    for ours, theirs in zip(loud, quiet, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.redundant
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("stage", SHARDING)
def test_the_norm_counts_each_replica_once(stage, norm_type):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, shard_size=2)
        net(rows(comm.rank)).square().mean().backward()
        gradients = zero.full_grads()
        norm = zero.clip_grad_norm_(0.1, norm_type)
        return norm, gradients, zero.full_grads()

    norms, gradients, clipped = zip(*run_threads(go, 4), strict=True)
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    whole = nn.utils.get_total_norm(list(gradients[0].values()), norm_type)
    torch.testing.assert_close(norms[0], whole, rtol=1e-5, atol=0)
    after = nn.utils.get_total_norm(list(clipped[3].values()), norm_type)
    torch.testing.assert_close(after, torch.tensor(0.1), rtol=1e-4, atol=0)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", SHARDING)
def test_evaluation_unsharded_weights_and_the_end_of_the_engine_need_one_group_only(stage):
    def go(comm):
        net = Net()
        zero = Zero(net, stage, comm=comm, shard_size=2)
        optim = zero.optimizer(torch.optim.AdamW, lr=0.01)
        backward(Turn(net, comm.rank, 0))
        optim.step()
        with torch.no_grad():
            first = net(rows(0))
        if comm.rank < 2:  # the other replica takes no part
            with labelled("alone"), zero.full_params():
                whole = {name: param.clone() for name, param in net.named_parameters()}
            assert all(torch.equal(whole[name], value) for name, value in zero.state_dict().items())
        zero.remove()
        assert torch.equal(net(rows(0)), first)
        return first

    outputs = run_threads(go, 4, timeout_s=120)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.redundant
@pytest.mark.parametrize("stage", SHARDING)
def test_muon_keeps_each_matrix_whole_on_one_rank_of_every_replica(stage):
    def go(comm, shard_size):
        net = Net()
        zero = Zero(net, stage, comm=comm, shard_size=shard_size)
        muon, adamw = muon_and_adamw(zero)
        for step in range(3):
            backward(Turn(net, 0, step))  # every rank's rows are rank 0's: sums are exact in any order
            muon.step()
            adamw.step()
            zero.zero_grad()
        return zero.state_dict(), len(zero.pieces(muon))

    flat = run_threads(lambda comm: go(comm, None), 2)
    hybrid = run_threads(lambda comm: go(comm, 2), 4)
    for rank, (weights, num_owned) in enumerate(hybrid):
        assert num_owned == flat[rank % 2][1]
        assert all(torch.equal(weights[name], whole) for name, whole in flat[0][0].items())
