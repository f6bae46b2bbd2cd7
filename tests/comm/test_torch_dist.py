"""What is torch.distributed's own; the rest is in test_contract.py."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from ranks import GlooRanks, RankError
from zeroshard.comm import TorchCommunicator


def test_without_a_process_group_the_way_out_is_named():
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised; call .* or use LocalCommunicator"):
        TorchCommunicator()


def outside_a_group(comm):
    group = dist.new_group([0])
    if comm.rank == 1:
        with pytest.raises(RuntimeError, match="this process is no member of the group"):
            TorchCommunicator(group)
    comm.barrier()
    if comm.rank == 0:
        dist.destroy_process_group(group)


def test_a_process_outside_the_group_is_refused(gloo_ranks):
    gloo_ranks(2).run(outside_a_group)


def order_of_sums(comm):
    """Whether the two reductions agree where addition does not commute with rounding, at sizes that gloo cuts."""
    agree = []
    for numel in (1, 3, 1000, 100_000):
        mine = torch.randn(comm.world_size * numel, generator=torch.Generator().manual_seed(comm.rank)) * 10**comm.rank
        whole, shard = mine.clone(), torch.empty(numel)
        comm.all_reduce(whole).wait()
        comm.reduce_scatter(shard, mine).wait()
        agree.append(torch.equal(whole.view(comm.world_size, -1)[comm.rank], shard))
    return agree


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_adds_in_one_order_at_every_size(world_size, gloo_ranks):
    assert gloo_ranks(world_size).run(order_of_sums) == [[True] * 4] * world_size


def fail_on_one(comm):
    if comm.rank == 1:
        raise KeyError("mine")


def test_the_harness_tells_what_a_rank_raised_and_starts_anew(gloo_ranks):
    ranks = GlooRanks(2)
    with pytest.raises(RankError, match="KeyError: 'mine'"):
        ranks.run(fail_on_one)
    assert not ranks.alive
