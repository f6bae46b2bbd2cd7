"""Two levels: what crosses a host's link, the order of sums, and how hosts are found."""

from __future__ import annotations

from functools import reduce

import pytest
import torch

from zeroshard.comm import RingCommunicator, SharedMemoryCommunicator, TwoLevelCommunicator, split
from zeroshard.comm.two_level import two_level
from zeroshard.comm.two_level.two_level import even_hosts
from zeroshard.errors import UserError
from zeroshard.train.config.sections import LinkConfig
from zeroshard.train.setup import ranks
from zeroshard.train.setup.links import Links


@pytest.mark.parametrize(
    ("hosts", "found"),
    [("a", (1, 1)), ("aabb", (2, 2)), ("abc", (3, 1)), ("aab", None), ("abab", None), ("aabbb", None)],
)
def test_hosts_are_even_where_each_has_as_many_ranks_side_by_side(hosts, found):
    assert even_hosts(list(hosts)) == found


def _count_sent(comm):
    """Bytes that this rank sends to other hosts from now on, as a list that grows."""
    sent, send = [], comm.across.transport.send

    def counted(message, to):
        sent.append(message.nbytes)
        return send(message, to)

    comm.across.transport.send = counted
    return sent


def _sends_each_byte_across_the_link_once(comm):
    own = TwoLevelCommunicator(comm.group, hosts="aabb")
    sent, numel = _count_sent(own), 1 << 18
    whole = own.empty(numel, torch.float32).fill_(1.0)
    shard = whole[own.rank * numel // 4 : (own.rank + 1) * numel // 4]
    own.reduce_scatter(shard, whole).wait()
    assert (shard == 4.0).all()
    assert sum(sent) == whole.nbytes // 4  # of each of two ranks: half of the tensor leaves the host
    sent.clear()
    own.all_gather(whole, shard).wait()
    assert (whole == 4.0).all()
    assert sum(sent) == whole.nbytes // 4
    own.close()


def test_half_of_a_tensor_leaves_each_of_two_hosts(gloo_ranks):
    """A ring over the four ranks would send three quarters of it over the same link."""
    gloo_ranks(4).run(_sends_each_byte_across_the_link_once)


def _adds_up_in_the_stated_order(comm, dtype):
    own = TwoLevelCommunicator(comm.group, hosts="aabb")
    for numel in (4 * 7, 4 * 5000):  # gathered from all, and reduced level by level
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(4)]
        hosts = [parts[0] + parts[1], parts[2] + parts[3]]
        wanted = torch.cat([(hosts[1] + hosts[0])[: numel // 2], (hosts[0] + hosts[1])[numel // 2 :]])
        got = parts[own.rank].clone()
        own.all_reduce(got).wait()
        assert torch.equal(got, wanted)
        uneven = parts[own.rank][:-3].clone()
        own.all_reduce(uneven).wait()
        assert torch.equal(uneven, reduce(torch.add, hosts)[:-3])
    own.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_of_a_host_s_ranks_and_then_of_hosts(dtype, gloo_ranks):
    gloo_ranks(4).run(_adds_up_in_the_stated_order, dtype)


def _large_and_small_sums_of_three_hosts_agree(comm):
    own = TwoLevelCommunicator(comm.group, hosts="abc")
    part = torch.randn(3 * 6000, generator=torch.Generator().manual_seed(own.rank))
    large, small = part.clone(), []
    own.all_reduce(large).wait()
    assert large.nbytes * 3 > two_level.SMALL_BYTES
    two_level.SMALL_BYTES, before = 1 << 30, two_level.SMALL_BYTES
    try:
        small = part.clone()
        own.all_reduce(small).wait()
    finally:
        two_level.SMALL_BYTES = before
    assert torch.equal(large, small)
    own.close()


def test_small_tensors_have_the_bits_of_large_ones(gloo_ranks):
    gloo_ranks(3).run(_large_and_small_sums_of_three_hosts_agree)


def _parts_are_what_their_hosts_allow(comm):
    own = TwoLevelCommunicator(comm.group, hosts="aabb")
    assert isinstance(split(own, [[0, 2], [1, 3]]), TwoLevelCommunicator)
    uneven = split(own, [[0, 1, 2], [3]])
    assert isinstance(uneven, RingCommunicator if own.rank < 3 else TwoLevelCommunicator)
    for part in (own, uneven):
        ones = torch.ones(100_000)
        part.all_reduce(ones).wait()
        assert (ones == part.world_size).all()
    own.close()


def test_a_part_whose_hosts_are_uneven_is_a_ring(gloo_ranks):
    gloo_ranks(4).run(_parts_are_what_their_hosts_allow)


def _uneven_hosts_are_refused(comm):
    with pytest.raises(UserError, match=r"comm: two-level needs the same number of .*'a': 2, 'b': 1.*; use ring"):
        TwoLevelCommunicator(comm.group, hosts="aab")


def test_uneven_hosts_are_refused(gloo_ranks):
    gloo_ranks(3).run(_uneven_hosts_are_refused)


def _on_one_host_all_is_memory(comm):
    own = TwoLevelCommunicator(comm.group)
    memory = SharedMemoryCommunicator(comm.group)
    assert (own.num_hosts, own.num_local) == (1, comm.world_size)
    one = torch.randn(50_000, generator=torch.Generator().manual_seed(comm.rank))
    other = one.clone()
    own.all_reduce(one).wait()
    memory.all_reduce(other).wait()
    assert torch.equal(one, other)
    own.close()
    memory.close()


def test_on_one_host_it_has_the_bits_of_shared_memory(gloo_ranks):
    gloo_ranks(3).run(_on_one_host_all_is_memory)


@pytest.mark.parametrize(
    ("hosts", "chosen"), [("aaaa", "shm"), ("aabb", "two-level"), ("abcd", "ring"), ("aaab", "ring")]
)
def test_auto_takes_what_the_hosts_allow(hosts, chosen, monkeypatch):
    monkeypatch.setattr(ranks, "hosts_of_ranks", lambda: list(hosts))
    assert ranks.choose("zero2", torch.device("cpu")) == chosen
    assert ranks.choose("zero2", torch.device("cpu"), shared_memory_bypasses=True) == "ring"
    assert ranks.choose("ddp", torch.device("cpu")) == "torch"


@pytest.mark.parametrize(
    ("mode", "goes_around"), [("none", False), ("simulated", False), ("netns", False), ("tc", True)]
)
def test_nodes_in_namespaces_are_hosts_and_memory_goes_around_an_interface(mode, goes_around):
    slowed = {"none": {}, "tc": {"device": "eth0", "bandwidth": "1Gbit/s"}}.get(mode, {"bandwidth": "1Gbit/s"})
    assert Links.of(LinkConfig(mode=mode, **slowed)).shared_memory_bypasses == goes_around
