from dataclasses import dataclass, replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from soak import examples
from zeroshard.lab.predict.cluster import SWITCH_CALL_S, Cluster
from zeroshard.lab.predict.hardware import LINKS, TREE_STEPS, Link, find_link

WITHIN = Link("within", 1e-6, 100e9, "invented", call_s=0.0, share=1.0)
BETWEEN = Link("between", 10e-6, 1e9, "invented", call_s=0.0, share=1.0)
NVLINK, NETWORK = LINKS["nvlink4"], find_link("400Gbit/s")
MIB = 2**20
OPS = st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
SIZES = st.integers(0, 34).map(lambda power: 2**power)
NODE_LINKS = st.sampled_from(["nvlink5", "nvlink3", "nvlink4-pcie", "xgmi3", "pcie4", "pcie3"])
NETWORKS = st.sampled_from(["400Gbit/s", "10Gbit/s", "infiniband-hdr", "ethernet-10g"])


@dataclass(frozen=True)
class ByOne(Cluster):
    """A cluster whose collectives use one algorithm."""

    algorithm: str = "ring"

    def _costs(self, *args):
        return (cost for cost in super()._costs(*args) if cost.algorithm == self.algorithm)


def test_ring_collectives_are_latency_and_bytes_over_bandwidth():
    node = ByOne(8, 8, WITHIN, BETWEEN, "ring")
    assert node.collective_s("all_gather", 800, 8) == pytest.approx(7e-6 + 7 / 8 * 800 / 100e9)
    assert node.collective_s("reduce_scatter", 800, 8) == node.collective_s("all_gather", 800, 8)
    assert node.collective_s("all_reduce", 800, 8) == pytest.approx(2 * node.collective_s("all_gather", 800, 8))
    assert node.collective_s("all_reduce", 800, 1) == 0.0


def test_between_nodes_the_network_links_of_a_node_work_together():
    cluster = ByOne(16, 4, WITHIN, BETWEEN, "ring")
    steps = 15 * 10e-6  # all ranks step together, as slowly as between nodes
    assert cluster.collective_s("all_gather", 10**9, 16) == pytest.approx(steps + 15 / 16 * 1e9 / 4e9)


def test_a_last_node_that_is_not_full_is_reached_by_the_links_that_it_has():
    for ranks, links in ((9, 1), (12, 4), (16, 8), (20, 4)):
        cluster = ByOne(ranks, 8, WITHIN, BETWEEN, "ring")
        moved_s = (ranks - 1) / ranks * 1e9 / (links * 1e9)
        assert cluster.collective_s("all_gather", 10**9, ranks) == pytest.approx((ranks - 1) * 10e-6 + moved_s)
    # Of an exchange a rank of the last node sends most: its parts for the 8 ranks of the other node.
    seconds = Cluster(9, 8, WITHIN, BETWEEN).collective_s("all_to_all", 9 * 10**6, 9)
    assert seconds == pytest.approx(10e-6 + 8e6 / 1e9)


def test_a_tree_wins_where_latency_does():
    ring, tree = (ByOne(4096, 8, WITHIN, BETWEEN, how) for how in ("ring", "tree"))
    auto = Cluster(4096, 8, WITHIN, BETWEEN)
    latencies = 2 * (7e-6 + 9 * TREE_STEPS * 10e-6)
    assert tree.collective_s("all_reduce", 8, 4096) == pytest.approx(latencies, rel=1e-2)
    for num_bytes in (8, 10**12):
        both = [each.collective_s("all_reduce", num_bytes, 4096) for each in (ring, tree)]
        assert auto.collective_s("all_reduce", num_bytes, 4096) == min(both)


def test_switches_reduce_within_a_node_what_is_large_enough():
    switched = replace(WITHIN, in_switch=0.7)
    with_switches, without = (Cluster(8, 8, link, BETWEEN) for link in (switched, WITHIN))
    assert with_switches.collective_s("all_reduce", 10**9, 8) == pytest.approx(SWITCH_CALL_S + 9 / 8 * 1e9 / 70e9)
    assert with_switches.collective_s("all_reduce", 8, 8) == without.collective_s("all_reduce", 8, 8)
    assert with_switches.collective_s("all_gather", 10**9, 8) == without.collective_s("all_gather", 10**9, 8)
    # two cards that are bridged have no switch between them
    assert with_switches.collective_s("all_reduce", 10**9, 2) == without.collective_s("all_reduce", 10**9, 2)


def test_an_exchange_sends_a_part_to_each_other_rank_by_the_link_that_leads_there():
    cluster = Cluster(8, 4, WITHIN, BETWEEN)
    assert cluster.collective_s("all_to_all", 8 * 10**9, 4) == pytest.approx(1e-6 + 6e9 / 100e9)
    assert cluster.collective_s("all_to_all", 8 * 10**9, 8) == pytest.approx(10e-6 + 4e9 / (0.9 * 1e9), rel=0.2)
    assert cluster.collective_s("all_to_all", 10**9, 1) == 0


def test_small_messages_go_by_a_protocol_of_short_steps_and_large_ones_by_simple():
    node = Cluster(8, 8, NVLINK, NETWORK)
    small, large = (node.fastest("all_gather", num_bytes, 8) for num_bytes in (256, 256 * MIB))
    assert (small.algorithm, small.protocol) == ("ring", "LL")
    assert small.seconds == pytest.approx(6.6e-6 + 7e-6 + 7 * 0.6e-6, rel=1e-3)
    assert (large.algorithm, large.protocol) == ("ring", "Simple")
    assert large.latency_s == pytest.approx(8.4e-6 + 7 * 3.4e-6)


def test_between_nodes_a_ring_of_small_messages_has_the_network_s_step_once_a_node():
    way = Cluster(256, 8, NVLINK, NETWORK).fastest("all_gather", 256, 256)
    assert way.protocol == "LL"
    assert way.latency_s == pytest.approx(13.6e-6 + 31 * 2.7e-6 + 224 * 1.5e-6)
    # a tree has as many steps as nodes double
    way = Cluster(256, 8, NVLINK, NETWORK).fastest("all_reduce", 64, 256)
    assert (way.algorithm, way.protocol) == ("tree", "LL")
    assert way.latency_s == pytest.approx(13.6e-6 + 2 * (7 * 0.6e-6 + 5 * 5e-6))


def test_without_switches_that_reduce_all_reduces_of_some_megabytes_go_by_ll128():
    cluster = Cluster(8, 8, LINKS["nvlink3"], NETWORK)
    found = [cluster.fastest("all_reduce", num_bytes * MIB, 8) for num_bytes in (1, 3, 256)]
    assert [(way.algorithm, way.protocol) for way in found] == [("ring", "LL"), ("ring", "LL128"), ("ring", "Simple")]


def test_where_each_node_has_one_rank_all_gathers_go_by_pat():
    alone, eight = Cluster(64, 1, NVLINK, NETWORK), Cluster(64, 8, NVLINK, NETWORK)
    way = alone.fastest("all_gather", MIB, 64)
    assert way.algorithm == "pat"
    assert way.latency_s == pytest.approx(8e-6 + 64 * 2.8e-6 + 6 * 4e-6)
    assert alone.fastest("all_gather", 2**36, 64).algorithm == "ring"
    assert eight.fastest("all_gather", MIB, 64).algorithm == "ring"


def test_over_infiniband_a_tree_has_shorter_levels_and_more_pieces_on_their_way():
    ethernet, infiniband = (
        Cluster(16, 8, LINKS["nvlink5"], find_link(name)) for name in ("400Gbit/s", "infiniband-ndr")
    )
    for num_bytes, measured_us in ((4 * MIB, 111.68), (64 * MIB, 346.14), (2**30, 3016.62)):
        way = infiniband.fastest("all_reduce", num_bytes, 16)
        assert way.algorithm == "tree"
        assert way.seconds * 1e6 == pytest.approx(measured_us, rel=0.07)
        assert ethernet.collective_s("all_reduce", num_bytes, 16) > way.seconds
    depth_s, moved_s = 2 * 7 * 3.4e-6 + 2 * 9.6e-6, 2**30 / (8 * 50e9 * 0.955)
    assert way.latency_s == pytest.approx(8.4e-6 + depth_s)
    assert way.seconds == pytest.approx(8.4e-6 + depth_s + moved_s + 2 * (moved_s * depth_s / 8) ** 0.5)


@pytest.mark.redundant
@settings(max_examples=examples(25, 3000), deadline=None, derandomize=True)
@given(OPS, SIZES, NODE_LINKS, NETWORKS, st.sampled_from([1, 4, 8]), st.integers(0, 9))
def test_more_bandwidth_is_never_slower_and_more_nodes_are_never_faster(op, size, inside, network, per_node, power):
    ranks = per_node * 2**power
    cluster = Cluster(ranks, per_node, LINKS[inside], find_link(network))
    seconds = cluster.collective_s(op, size, ranks)
    for level in ("within", "between"):
        link = getattr(cluster, level)
        faster = replace(cluster, **{level: replace(link, bytes_per_s=link.bytes_per_s * 3)})
        assert faster.collective_s(op, size, ranks) <= seconds
    assert cluster.collective_s(op, 2 * size, ranks) >= seconds
    if op != "all_to_all":  # of which each rank's parts become smaller
        more = replace(cluster, world_size=2 * ranks)
        assert more.collective_s(op, size, 2 * ranks) >= seconds or ranks == 1
