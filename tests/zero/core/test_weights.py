"""The weights of one buffer, with nothing attached: what a step and a forward do to them, at each row of the table."""

from functools import partial

import pytest
import torch
from torch import nn

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.precision import Precision
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import STAGES
from zeroshard.zero.core.weights import PlainTransport, Weights, WeightState

WORLD_SIZE = 2
PRECISIONS = {"fp32": Precision(), "bf16": Precision(param_dtype=torch.bfloat16)}


def _weights(comm, stage, precision):
    """Seven elements that each rank begins with values of its own: shards end in the middle of the first parameter."""
    params = [("a", nn.Parameter(torch.arange(6.0).view(2, 3) + comm.rank)), ("b", nn.Parameter(torch.tensor(6.0)))]
    layout = FlatLayout.of([(name, param.shape) for name, param in params], comm.world_size)
    transport, rank_groups = PlainTransport(comm, layout), RankGroups(comm, comm, LocalCommunicator())
    return Weights("unit", params, layout, STAGES[stage], rank_groups, PRECISIONS[precision], transport)


def _shown(weights):
    return torch.cat([param.detach().float().flatten() for param in weights.params]).tolist()


def _step(weights):
    """What an optimizer does: one is added to this rank's pieces of the master weights."""
    for piece in weights.pieces:
        weights.piece_of_master(piece).add_(1.0)
    weights.mark_stale()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", STAGES)
def test_each_step_is_in_the_weights_of_every_rank_after_a_gather(stage, precision):
    def go(comm):
        weights, seen = _weights(comm, stage, precision), []
        for _ in range(3):
            weights.unshard()
            weights.wait_for_unshard()
            seen.append((weights.state, _shown(weights), weights.gather_master()[:7].tolist()))
            weights.reshard()
            _step(weights)
        return seen

    for seen in run_threads(go, WORLD_SIZE):
        for step, (state, shown, master) in enumerate(seen):
            assert state is WeightState.UNSHARDED
            assert shown == master == [value + step for value in range(7)]  # rank 0's values, on both ranks


STATES = {  # at first, after a step, after `unshard`, after `wait_for_unshard`, after `unshard(again=True)`, in the end
    "0 fp32": ["UNSHARDED"] * 6,
    "0 bf16": ["UNSHARDED", "STALE_HIDDEN", "GATHERING", "UNSHARDED", "UNSHARDED", "UNSHARDED"],
    "1 fp32": ["UNSHARDED", "STALE_VISIBLE", "REFRESHING", "UNSHARDED", "REFRESHING", "REFRESHING"],
    "1 bf16": ["UNSHARDED", "STALE_HIDDEN", "GATHERING", "UNSHARDED", "REFRESHING", "REFRESHING"],
    "3 fp32": ["SHARDED", "SHARDED", "GATHERING", "UNSHARDED", "REFRESHING", "SHARDED"],
    "3 bf16": ["SHARDED", "SHARDED", "GATHERING", "UNSHARDED", "REFRESHING", "SHARDED"],
}


@pytest.mark.parametrize("row", STATES)
def test_the_state_says_what_is_in_memory_and_what_parameters_show(row):
    stage, precision = row.split()
    again = partial(Weights.unshard, again=True)
    life = [_step, Weights.unshard, Weights.wait_for_unshard, again, Weights.reshard]

    def go(comm):
        weights, states = _weights(comm, int(stage), precision), []
        for happens in [lambda weights: None, *life]:
            happens(weights)
            assert weights.state.visible is not all(param.isnan().all() for param in weights.params)
            assert bool(weights.full.untyped_storage().nbytes()) is (weights.state is not WeightState.SHARDED)
            states.append(weights.state.name)
        weights.unshard()
        weights.wait_for_unshard()
        assert _shown(weights) == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]  # whatever was in flight
        return states

    assert run_threads(go, WORLD_SIZE) == [STATES[row]] * WORLD_SIZE


def test_a_gather_that_failed_is_not_shown_and_is_issued_again():
    class Lost:
        def wait(self):
            raise ConnectionError

    def go(comm):
        weights = _weights(comm, 3, "fp32")
        weights.unshard()
        work, weights._work = weights._work, Lost()
        with pytest.raises(ConnectionError):
            weights.wait_for_unshard()
        work.wait()
        assert not weights.state.readable
        assert all(param.isnan().all() for param in weights.params)
        weights.unshard()
        weights.wait_for_unshard()
        return _shown(weights)

    assert run_threads(go, WORLD_SIZE) == [[float(value) for value in range(7)]] * WORLD_SIZE
