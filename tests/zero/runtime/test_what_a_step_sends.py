import pytest
import torch
from torch import nn

from nets import WIDTH, Net, rows
from zeroshard.comm import CONTROL, ObservedCommunicator, run_threads
from zeroshard.zero import Placement, ShardingStrategy, Zero

KEEP_WEIGHTS = ShardingStrategy(Placement.SHARD, Placement.SHARD, Placement.SHARD, reshard_after_forward=False)

# What a step of three units sends, written down by hand: G gathers weights, S reduces gradients to shards, A adds them
# up on all ranks (at stage 0 whole, else a shard's over replicas). Forward, then backward. What is predicted is held
# against what is sent elsewhere, and both read `backward_ops`: here a mistake in it has nobody to agree with.
SENT = [
    ({"stage": 0}, "", "A2 A1 A0 Aroot"),
    ({"stage": 1}, "Groot G0 G1 G2", "S2 S1 S0 Sroot"),
    ({"stage": 2}, "Groot G0 G1 G2", "S2 S1 S0 Sroot"),
    ({"stage": 3}, "Groot G0 G1 G2", "G1 S2 G0 S1 S0 Sroot"),
    ({"stage": 3, "prefetch": 0}, "Groot G0 G1 G2", "S2 G1 S1 G0 S0 Sroot"),
    ({"stage": 3, "prefetch": 2}, "Groot G0 G1 G2", "G1 G0 S2 S1 S0 Sroot"),
    ({"stage": KEEP_WEIGHTS}, "Groot G0 G1 G2", "S2 S1 S0 Sroot"),
    ({"stage": 1, "shard_size": 2}, "Groot G0 G1 G2", "S2 S1 A2 S0 A1 Sroot A0 Aroot"),
    ({"stage": 3, "shard_size": 2}, "Groot G0 G1 G2", "G1 S2 G0 S1 A2 S0 A1 Sroot A0 Aroot"),
    ({"stage": 3, "shard_size": 1}, "", "A2 A1 A0 Aroot"),
    ({"stage": 2, "units": ["first", "blocks", "last"]}, "Gfirst G0 G1 G2 Glast", "Slast S2 S1 S0 Sfirst"),
]


@pytest.mark.redundant(but=["{'stage': 3, 'shard_size': 2}-Groot G0 G1 G2-G1 S2 G0 S1 A2 S0 A1 Sroot A0 Aroot"])
@pytest.mark.parametrize(("settings", "forward", "backward"), SENT, ids=lambda value: str(value).replace("/", "-")[:40])
def test_a_step_sends_what_is_written_down_here_in_that_order(settings, forward, backward):
    letters = {"all_gather": "G", "reduce_scatter": "S", "all_reduce": "A"}

    def taken(observed):
        records = [record for record in observed.drain() if record.label != CONTROL]
        return " ".join(letters[r.op] + r.label.split("/")[0].removeprefix("blocks.") for r in records)

    def go(comm):
        observed = ObservedCommunicator(comm)
        net = Net(num_blocks=3)
        zero = Zero(net, comm=observed, **settings)
        optimizer = zero.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):  # in the second step weights are stale, and the order is known
            observed.drain()
            loss = net(rows(comm.rank)).sum()
            sent = [taken(observed)]
            loss.backward()
            sent.append(taken(observed))
            optimizer.step()
            optimizer.zero_grad()
        return sent

    assert run_threads(go, 4) == [[forward, backward]] * 4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_backward_through_two_forwards_reduces_each_unit_once(stage):
    def go(comm):
        observed = ObservedCommunicator(comm)
        net = Net(num_blocks=3)
        zero = Zero(net, stage, comm=observed)
        for _ in range(2):  # in the second step the order is known
            loss = net(rows(comm.rank)).sum() + net(rows(comm.rank + 2)).sum()
            observed.drain()
            loss.backward()
            sent = [record.label for record in observed.drain() if record.label.endswith("/grads")]
            zero.zero_grad()
        return sent

    units = ["blocks.2", "blocks.1", "blocks.0", "root"]
    assert run_threads(go, 2) == [[f"{unit}/grads" for unit in units]] * 2


@pytest.mark.redundant
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gradients_of_units_inside_of_others_are_reduced_once(stage):
    """[Note: Units inside of units] in `nested_units`: they arrive within the outer unit's backward."""

    def go(comm):
        observed = ObservedCommunicator(comm)
        net = Net(num_blocks=2, block=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
        zero = Zero(net, stage, units=["blocks.0", "blocks.1", "blocks.0.0", "blocks.1.0"], comm=observed)
        for _ in range(2):  # in the second backward the order is known
            observed.drain()
            net(rows(comm.rank)).sum().backward()
            sent = [record.label for record in observed.drain() if record.label.endswith("/grads")]
            zero.zero_grad()
        return sent

    units = ["blocks.1.0", "blocks.1", "blocks.0.0", "blocks.0", "root"]
    assert run_threads(go, 2) == [[f"{unit}/grads" for unit in units]] * 2
