"""Ranks, what joins them, and how long a collective among them takes.

A collective takes a latency for each step of its algorithm and its bytes over the slowest link (Thakur et al. 2005,
"Optimization of Collective Communication Operations in MPICH", https://doi.org/10.1177/1094342005051521; ring and
double binary tree as NCCL reckons them, src/graph/tuning.cc)::

    all-gather, reduce-scatter    ring   call + (n - 1) a + (n - 1) / n  B / b
    all-reduce                    ring   call + 2 (n - 1) a + 2 (n - 1) / n  B / b
                                  tree   call + (sqrt(2 B / b) + sqrt(2 (k - 1 + 4 log2 nodes) a))^2
                                  nvls   call' + B / b'                                (within a node)

with n ranks, k of them in a node, a the latency of a step and b the bytes a second of the narrowest place: a link
within the node, or the k network links of a node together. Ranks of a ring step together, so over several nodes every
step has a network's latency: published all-gathers among 16 to 256 ranks take the same time for a step of as many bytes
(``benchmarks/published/collectives/``). NVLS: switches of NVLink add up what passes them, from Hopper on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.hardware import Link

Algorithm = Literal["auto", "ring", "tree", "nvls"]
# Fitted, see docs/plan-accuracy.md: of computation, for each doubling of the nodes.
STRAGGLING = 0.01
# Of the latency of a ring's step, what one level of a tree over nodes takes; fitted to all-reduces on AWS.
TREE_STEPS = 4
# An all-reduce in the switches: what it takes however little it sends, and among how many ranks there are switches.
SWITCH_CALL_S, SWITCHED_RANKS = 40e-6, 4


@dataclass(frozen=True)
class Cluster:
    """Ranks and what joins them; ranks of a node are neighbours.

    Attributes:
        world_size: all ranks.
        ranks_per_node: of a full node.
        within: the link between ranks of a node.
        between: the link that each rank has to other nodes.
        algorithm: of all-reduces; ``auto``: the fastest. Other collectives have a ring.
    """

    world_size: int
    ranks_per_node: int
    within: Link
    between: Link
    algorithm: Algorithm = "auto"

    def collective_s(self, op: str, num_bytes: int, num_ranks: int, *, replicas: bool = False) -> float:
        """Seconds of one collective.

        Args:
            op: ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``.
            num_bytes: of the whole buffer.
            num_ranks: how many take part: neighbours, or with ``replicas`` one of each group of neighbours.
            replicas: whether they are those that hold the same shard.
        """
        if num_ranks == 1:
            return 0.0
        if num_ranks == self.within.num_ranks and op in self.within.collectives:
            constant_s, s_per_byte = self.within.collectives[op]  # measured among as many
            return constant_s + num_bytes * s_per_byte
        in_node = self._in_node(num_ranks, replicas=replicas)
        num_nodes = -(-num_ranks // in_node)
        if op == "all_to_all":
            return self._exchange_s(num_bytes, num_ranks, in_node)
        ways = {"ring": self._ring_s(op, num_bytes, num_ranks, in_node, num_nodes)}
        if op == "all_reduce":
            ways["tree"] = self._tree_s(num_bytes, in_node, num_nodes)
            if self.within.in_switch and num_nodes == 1 and in_node >= SWITCHED_RANKS:
                ways["nvls"] = SWITCH_CALL_S + num_bytes / (self.within.bytes_per_s * self.within.in_switch)
        return min(ways.values()) if self.algorithm == "auto" else ways.get(self.algorithm, ways["ring"])

    def _in_node(self, num_ranks: int, *, replicas: bool) -> int:
        """How many of the ranks of a collective are in one node."""
        if not replicas:
            return min(num_ranks, self.ranks_per_node)
        shard_size = max(self.world_size // num_ranks, 1)
        return min(num_ranks, max(self.ranks_per_node // shard_size, 1))

    def num_nodes(self, num_ranks: int, *, replicas: bool = False) -> int:
        """Over how many nodes a collective goes; arguments as of `collective_s`."""
        return -(-num_ranks // self._in_node(num_ranks, replicas=replicas))

    def _ring_s(self, op: str, num_bytes: int, num_ranks: int, in_node: int, num_nodes: int) -> float:
        """All ranks step together, so that over several nodes every step takes as long as one between nodes."""
        slowest = self.between if num_nodes > 1 else self.within
        rounds = 2 if op == "all_reduce" else 1
        moved = (num_ranks - 1) / num_ranks * num_bytes / self._bytes_per_s(in_node, num_nodes)
        return slowest.call_s + rounds * ((num_ranks - 1) * slowest.latency_s + moved)

    def _tree_s(self, num_bytes: int, in_node: int, num_nodes: int) -> float:
        """A chain in each node and two binary trees over nodes; of two nodes each sends the other all bytes once.

        Pieces follow each other through the tree: small ones wait for more latencies, large ones for the first to
        arrive. With the best size it takes (sqrt(bytes / b) + sqrt(latencies))^2.
        """
        depth_s = 2 * (in_node - 1) * self.within.latency_s
        depth_s += 2 * math.log2(num_nodes) * TREE_STEPS * self.between.latency_s
        if self.within.in_switch and in_node >= SWITCHED_RANKS:
            moved_s = num_bytes / (self.within.bytes_per_s * self.within.in_switch)
        else:
            moved_s = 2 * num_bytes / self._bytes_per_s(in_node, 1)
        if num_nodes > 1:
            outside = in_node * self.between.bytes_per_s * self.between.share
            moved_s = max(moved_s, min(num_nodes - 1, 2) * num_bytes / outside)
        call_s = self.between.call_s if num_nodes > 1 else self.within.call_s
        return call_s + (math.sqrt(moved_s) + math.sqrt(depth_s)) ** 2

    def _bytes_per_s(self, in_node: int, num_nodes: int) -> float:
        """Of the narrowest place of a ring: a link within a node, or the network links of a node together."""
        inside = math.inf if in_node == 1 else self.within.bytes_per_s * self.within.share
        if num_nodes == 1:
            return inside
        share = self.between.share * max(1 - self.between.falloff * math.log2(num_nodes), 0.1)
        return min(inside, in_node * self.between.bytes_per_s * share)

    def _exchange_s(self, num_bytes: int, num_ranks: int, in_node: int) -> float:
        """Of an all-to-all: each rank sends a part to each other at once, by the link that leads there."""
        part = num_bytes / num_ranks
        inside_s = part * (in_node - 1) / (self.within.bytes_per_s * self.within.share)
        if num_ranks <= in_node:
            return self.within.call_s + self.within.latency_s + inside_s
        num_nodes = -(-num_ranks // in_node)
        share = self.between.share * max(1 - self.between.falloff * math.log2(num_nodes), 0.1)
        across_s = part * (num_ranks - in_node) / (self.between.bytes_per_s * share)
        return self.between.call_s + self.between.latency_s + max(inside_s, across_s)

    @property
    def stragglers(self) -> float:
        """What computation takes beside that of one node: every step waits for the slowest of all nodes."""
        return 1.0 + STRAGGLING * math.log2(max(self.world_size / self.ranks_per_node, 1.0))

    def slowing_s(self, message: Message) -> float:
        """By how many seconds a collective slows the computation that it runs beside; 0 where nobody has measured."""
        if message.world_size != self.within.num_ranks or message.op not in self.within.beside:
            return 0.0
        constant_s, s_per_byte = self.within.beside[message.op]
        return constant_s + message.num_bytes * s_per_byte
