"""A second copy of sharded weights over a node's ranks: the bits of stage 3, and what crosses between nodes."""

from collections import Counter
from itertools import product

import pytest
import torch

from exactness import same_bits
from late import late
from zero.transport.wire_runs import net, steps
from zeroshard.comm import CONTROL, NullCommunicator, ObservedCommunicator, run_threads
from zeroshard.lab.predict.buffers import buffers_of
from zeroshard.lab.predict.memory import OPTIMIZER_STATES, state_bytes
from zeroshard.zero import MixedPrecision, Zero

WIRE = MixedPrecision(gather="int8", reduce="int8", block=32)
WIRES = {
    "as it is": None,
    "int8": WIRE,
    "bf16": MixedPrecision(gather=torch.bfloat16, reduce="int4"),
    "bf16 computes": MixedPrecision(torch.bfloat16, gather="int4"),
}
AROUND = {"alone": {}, "evaluates": {"evaluates": True}, "writes": {"writes": True}}


def _train(comm, num_micro=1, precision=None, *, evaluates=False, writes=False, **kwargs):
    zero = Zero(net(recomputes=True), 3, comm=comm, precision=precision, **kwargs)
    optimizer = zero.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for step in range(3):
        if evaluates:
            with torch.no_grad():
                losses.append(zero.model(torch.ones(2, 48)))
        if writes and step == 1:
            with zero.full_params(write_back=True), torch.no_grad():
                zero.model.embed.weight[0, 0] = 0.75
        losses += steps(zero, optimizer, [step], num_micro)
    return losses, zero.state_dict()


@pytest.mark.redundant(but=["bf16-world2-accumulation2-3-alone"])
@pytest.mark.parametrize(
    ("wire", "world", "accumulation", "prefetch", "around"),
    [
        ("int8", (4, None), (2, "sharded"), 1, "writes"),
        ("as it is", (8, 4), (2, "local"), 0, "evaluates"),
        ("bf16", (4, None), (1, None), 3, "alone"),
        ("bf16 computes", (4, None), (2, "sharded"), 1, "evaluates"),
        *(
            pytest.param(*each, marks=pytest.mark.soak)
            for each in product(WIRES, [(4, None), (8, 4)], [(2, "sharded"), (2, "local")], [0, 1, 3], AROUND)
        ),
    ],
)
def test_weights_from_the_node_have_the_bits_of_those_from_everywhere(wire, world, accumulation, prefetch, around):
    """Under a communicator that delivers as late as it may and poisons what has not come: nothing is read early.

    Of a model with a frozen block and one that is recomputed; within a group that shards, where there are replicas.
    """
    world_size, shard_size = world
    num_micro, accumulate = accumulation
    settings = {"precision": WIRES[wire], "shard_size": shard_size, "num_micro": num_micro, "accumulate": accumulate}
    settings |= {"prefetch": prefetch, **AROUND[around]}
    plain = run_threads(lambda comm: _train(comm, **settings), world_size)
    near = run_threads(lambda comm: _train(late(comm), secondary_shard_size=2, **settings), world_size)
    assert same_bits(plain, near)


def test_only_the_first_gather_of_a_step_crosses_between_nodes():
    observed = ObservedCommunicator(NullCommunicator(4, 3))
    zero = Zero(net(), 3, comm=observed, secondary_shard_size=2)
    optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
    for _ in range(2):
        observed.drain()
        for _ in range(2):
            zero.model(torch.randn(2, 48)).backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = Counter((r.label, r.world_size) for r in observed.records if r.op == "all_gather" and r.label != CONTROL)
    for unit in ("root", "blocks.0", "blocks.2"):
        assert sent[(f"{unit}/weights", 4)] == 1
        assert sent[(f"{unit}/weights", 2)] >= 1
    assert sent[("blocks.1/weights", 4)] == 0  # frozen: it came in the first step


@pytest.mark.parametrize("precision", [None, WIRE], ids=["fp32", "packed"])
def test_memory_is_that_of_the_copy_and_of_packed_weights_that_of_their_codes(precision):
    def resident(**kwargs):
        zero = Zero(net(), 3, comm=NullCommunicator(8), precision=precision, **kwargs)
        return zero.memory_bytes()["params"], zero, [group.params for group in zero._runtime.groups()]

    without, _, groups = resident()
    with_it, zero, _ = resident(secondary_shard_size=4)
    gathered = [
        8 * form.num_bytes(each.layout.shard_numel) if form is not None else each.layout.padded_numel * 4
        for each, form in ((each, each.transport.form) for each in groups)
    ]
    assert with_it - without == sum(gathered) // 4
    buffers = buffers_of(net(), 8, precision=precision)
    assert state_bytes(buffers, zero.strategy, 0, OPTIMIZER_STATES["SGD"], precision)["params"] == with_it
