"""`Gradients` and their norm, at each stage; further cases are in `tests/zero/buffers/test_flat_grads.py`."""

import math

import pytest
import torch

from zeroshard.comm import LocalCommunicator, run_threads
from zeroshard.comm.base import split
from zeroshard.zero.core.gradients import Gradients, clip_, global_norm
from zeroshard.zero.core.layout import FlatLayout
from zeroshard.zero.core.ranks import RankGroups
from zeroshard.zero.core.strategy import STAGES

SHAPES = [("a", (5, 3)), ("unused", (4,)), ("b", (300,))]


def _drawn(rank, micro_batch):
    drawn = torch.Generator().manual_seed(10 * rank + micro_batch)
    return {slot: torch.randn(SHAPES[slot][1], generator=drawn) for slot in (0, 2)}


def _reduced(stage, comm, groups=None, reductions=((0, 1),)):
    """Gradients, of the micro-batches of each reduction; and their mean in the shapes of parameters, unsharded."""
    groups = groups or RankGroups(comm, comm, LocalCommunicator())
    layout = FlatLayout.of(SHAPES, groups.shard_group.world_size)
    of = {"device": torch.device("cpu"), "reduced_dtype": torch.float32, "reduce_dtype": torch.float32}
    grads = Gradients("unit", layout, STAGES[stage], groups, **of)
    for micro_batches in reductions:
        for micro_batch in micro_batches:
            for slot, grad in _drawn(comm.rank, micro_batch).items():
                grads.accumulate(slot, grad)
        grads.reduce()
    grads.wait_for_reduce()
    full = torch.empty(layout.padded_numel) if grads.shard_optim else grads.reduced.clone()
    if grads.shard_optim:
        layout.gather(groups.shard_group, full, grads.reduced).wait()
    return grads, layout.views(full)


@pytest.mark.parametrize("reductions", [((0, 1),), ((0,), (1, 2))])
def test_the_mean_over_ranks_has_the_same_bits_at_every_stage(reductions):
    means = [run_threads(lambda comm, s=s: _reduced(s, comm, None, reductions)[1], 3)[0] for s in STAGES]
    drawn = [_drawn(rank, micro_batch) for rank in range(3) for batches in reductions for micro_batch in batches]
    for slot, mean in enumerate(means[0]):
        assert all(torch.equal(mean, other[slot]) for other in means)
        torch.testing.assert_close(mean, sum(each.get(slot, torch.zeros(4)) for each in drawn) / 3)


def test_replicas_have_the_mean_over_all_ranks_and_cleared_slots_have_none():
    def go(comm):
        grads, mean = _reduced(2, comm, RankGroups(comm, split(comm, [[0, 1], [2, 3]]), split(comm, [[0, 2], [1, 3]])))
        used = list(grads.used)
        grads.clear({0})
        left = [piece.abs().sum().item() for piece in grads.pieces(grads.layout.owned(grads.comm.rank), [])]
        grads.clear({2})
        return used, mean[2], left[0] if grads.comm.rank == 0 else 0, grads.reduced

    expected = sum(_drawn(rank, micro_batch)[2] for rank in range(4) for micro_batch in (0, 1)) / 4
    for used, mean, cleared, reduced in run_threads(go, 4):
        assert (used, cleared, reduced) == ([True, False, True], 0, None)
        torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("stage", STAGES)
def test_norm_and_clipping_are_torchs(stage, norm_type):
    def go(comm):
        grads, mean = _reduced(stage, comm)
        params = [torch.nn.Parameter(view) for view in mean]
        for param in params:
            param.grad = param.detach().clone()
        norm = global_norm([grads], comm, norm_type, torch.device("cpu"))
        torch.testing.assert_close(norm.float(), torch.nn.utils.clip_grad_norm_(params, 0.1, norm_type))
        clip_([grads], norm, 0.1)
        for piece in grads.layout.owned(comm.rank):
            expected = params[piece.slot].grad.flatten()[slice(*piece.interval)]
            torch.testing.assert_close(grads.pieces([piece], [])[0], expected)

    run_threads(go, 3)
