"""Gradients in a wire format over nodes: added up inside a node in full precision, quantised between nodes."""

import copy
import itertools
from functools import partial

import pytest
import torch
from torch import nn

from late import late
from zeroshard import checkpoint
from zeroshard.comm import LocalCommunicator, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.wire_formats import BlockFormat
from zeroshard.zero import LocalSteps, MixedPrecision, Zero

WIDTH = 96


def _drawn():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        blocks = [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(*blocks)


ORIGINAL = _drawn()  # before there are threads, which share a generator


def _int8(node_size, **kwargs):
    return MixedPrecision(gather="int8", reduce="int8", block=64, node_size=node_size, **kwargs)


def _engine(comm, stage, precision, **kwargs):
    zero = Zero(copy.deepcopy(ORIGINAL), stage=stage, comm=comm, precision=precision, units="auto", **kwargs)
    return zero, zero.optimizer(torch.optim.AdamW, lr=1e-2)


def _loss(zero, step):
    generator = torch.Generator().manual_seed(1000 * step + zero.comm.rank)
    return zero.model(torch.randn(4, WIDTH, generator=generator)).square().mean()


def _train(zero, optimizer, steps, num_micro=1):
    norms = []
    for step in steps:
        for micro in range(num_micro):
            with zero.micro_batch(last=micro == num_micro - 1):
                _loss(zero, 10 * step + micro).backward()
        norms.append(zero.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(norms), zero.state_dict()


def _equal(one, other):
    assert torch.equal(one[0], other[0])
    assert all(torch.equal(one[1][name], other[1][name]) for name in one[1])


@pytest.mark.pairwise
@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("accumulate", ["local", "sharded"])
@pytest.mark.parametrize("is_late", [False, True])
def test_stages_have_the_same_bits_over_nodes(world_size, node_size, accumulate, is_late):
    def rank_main(comm, stage):
        precision = _int8(node_size)
        zero, optimizer = _engine(late(comm) if is_late else comm, stage, precision, accumulate=accumulate)
        return _train(zero, optimizer, range(3), num_micro=2)

    of_stages = [run_threads(partial(rank_main, stage=stage), world_size) for stage in (1, 2, 3)]
    for one, other in itertools.pairwise(of_stages):
        _equal(one[0], other[0])
    assert all(torch.equal(rank[0], of_stages[0][0][0]) for rank in of_stages[0])


def test_the_sum_is_of_sums_of_nodes_in_their_order():
    """In fp32 nothing is rounded on the way: the sum inside each node, then over nodes, and each rank's own part."""

    def rank_main(comm):
        precision = MixedPrecision(reduce=torch.float32, node_size=2)
        zero, _ = _engine(comm, 2, precision)
        _loss(zero, 0).backward()
        return {name: param.grad.full_tensor() for name, param in zero.model.named_parameters()}

    def alone(rank):
        zero, _ = _engine(LocalCommunicator(), 0, MixedPrecision())
        generator = torch.Generator().manual_seed(rank)
        zero.model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        return {name: param.grad.full_tensor() / 6 for name, param in zero.model.named_parameters()}

    found = run_threads(rank_main, 6)[0]
    parts = [alone(rank) for rank in range(6)]
    for name in (name for name in found if name.endswith("1.weight")):
        a, b, c = (parts[rank][name] + parts[rank + 1][name] for rank in (0, 2, 4))
        torch.testing.assert_close(found[name], (a + b) + c, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_resumed_run_over_nodes_rounds_as_the_one_that_went_on(stage, tmp_path):
    def rank_main(comm):
        zero, optimizer = _engine(comm, stage, _int8(2))
        _train(zero, optimizer, range(2))
        checkpoint.save(tmp_path / "there", zero, step=2)
        went_on = _train(zero, optimizer, range(2, 4))
        other, again = _engine(comm, stage, _int8(2))
        checkpoint.load(tmp_path / "there", other)
        _equal(went_on, _train(other, again, range(2, 4)))

    run_threads(rank_main, 4)


def test_a_node_sends_its_sum_to_others_once():
    """Between nodes a rank sends its part of the node's sum alone; the sum inside a node is of the whole buffer."""

    def sent(node_size):
        observed = ObservedCommunicator(NullCommunicator(16, rank=5))
        precision = MixedPrecision(reduce="int8", node_size=node_size)
        zero = Zero(nn.Linear(512, 512, bias=False), 2, comm=observed, precision=precision)
        observed.drain()
        zero.model(torch.randn(1, 512)).sum().backward()
        return [(record.op, record.num_bytes) for record in observed.drain() if record.scope.endswith("/grads")]

    packed = BlockFormat("int8", 256).num_bytes(512 * 512 // 16)
    assert sent(None) == [("all_to_all", 16 * packed)]
    assert sent(4) == [("reduce_scatter", 4 * 512 * 512), ("all_to_all", 4 * packed)]


def test_nodes_are_whole_and_there_is_something_to_send():
    def zero(world_size, node_size, **kwargs):
        _engine(NullCommunicator(world_size), 2, _int8(node_size), **kwargs)

    with pytest.raises(
        ValueError, match=r"^node_size: 4 does not divide 6 ranks into several groups; choose one of 2, 3$"
    ):
        zero(6, 4)
    with pytest.raises(ValueError, match=r"^node_size: 2 does not divide 1 ranks into several groups; leave it out$"):
        zero(1, 2)
    with pytest.raises(
        ValueError, match=r"^node_size: 2 is given, and with shard_size = 2 gradients are added up inside"
    ):
        zero(4, 2, shard_size=2)
    with pytest.raises(
        ValueError, match=r"^node_size: 2 is given, and with shard_size = 2 gradients are added up inside"
    ):
        zero(4, 2, shard_size=2, replicas=LocalSteps(every=4))
    for size in (0, 1, True, 2.0, "2"):
        with pytest.raises(ValueError, match=r"are no ranks of a node; give 2 or more$"):
            MixedPrecision(reduce="int8", node_size=size)
    with pytest.raises(ValueError, match=r"^node_size: 2 is given, and gradients have no wire format"):
        MixedPrecision(gather="int8", node_size=2)
