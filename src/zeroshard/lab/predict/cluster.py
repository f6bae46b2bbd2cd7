"""A cluster's topology, and the time that a collective takes on it with the fastest of NCCL's algorithms and protocols.

Each pair of algorithm and protocol has a latency, the time of a collective of no bytes, and a rate. The model is the
one by which NCCL itself chooses (NCCL 2.29, src/graph/tuning.cc; Thakur et al. 2005, "Optimization of Collective
Communication Operations in MPICH", https://doi.org/10.1177/1094342005051521)::

    all-gather, reduce-scatter   ring   call + (n - 1) a + (n - 1) / n  B / b
                                 pat    call + n c + log2(n) l + (n - 1) / n  B / (0.75 b)   (one rank per node)
    all-reduce                   ring   call + 2 (n - 1) a + 2 (n - 1) / n  B / b
                                 tree   call + m + d + 2 sqrt(m d / w),  m = 2 B / b,  d = 2 (k - 1 + t log2 nodes) a
                                 nvls   call + (k + 1) / k  B / s                            (within a node)

with n ranks, k of them in a node, B bytes of the unsharded buffer, a the latency of a step, and b the bandwidth of the
bottleneck in bytes per second: a link within the node, or the k network links of a node together. These formulas are
for protocol Simple. All ranks of a ring step together, so over several nodes every step has the network's latency:
published all-gathers among 16 to 256 ranks take the same time per step of as many bytes
(``benchmarks/claims/published/collectives/``). A level of a tree takes t such latencies, and w pieces are in flight at
once: `Link.tree_steps`, `Link.window`. c is PAT's time per rank, l its time per level, and s the rate of the switches.

LL and LL128 send a flag with each 4 or 120 bytes of data, so that no rank waits for the end of a step: steps are
shorter, and the bandwidth b' is smaller (`zeroshard.lab.predict.hardware.Protocol`). Their rings and trees are modelled
like Simple's, but trees are not pipelined, and a ring's steps inside nodes have their own latency a_in::

    ring   call + inside max(a_in, o) + between a + rounds (n - 1) / n  B / b'
    tree   call + 2 ((k - 1) a_in + log2(nodes) a) + 2 B / b'

with "inside" and "between" the numbers of steps inside and between nodes, and o the time in which NCCL's network proxy
posts a message (inside steps take at least o only if the ring also leaves the node). LL128 is used on NVLink only:
tables of nccl-tests show none of its latencies between nodes. NVLS: from Hopper on, NVLink's switches reduce; each rank
sends its unsharded buffer, and its k-th part of the sum comes back over the same links. PAT: Jeaugey 2025, "PAT: a new
algorithm for all-gather and reduce-scatter operations at scale", https://arxiv.org/abs/2506.20252; NCCL uses it if each
node has one rank of the group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from zeroshard.lab.predict.actions import Message
from zeroshard.lab.predict.hardware import Link, Protocol

# By what share computation takes longer for each doubling of the nodes. Fitted, see docs/plan-accuracy.md.
STRAGGLING = 0.01
# An all-reduce in the switches (NVLS): its latency, and the least number of ranks for which there are switches.
SWITCH_CALL_S, SWITCHED_RANKS = 40e-6, 4
# PAT: seconds of a call, per rank and per level, and its share of a ring's rate (tuning.cc).
PAT_CALL_S, PAT_RANK_S, PAT_LEVEL_S, PAT_SHARE = 8.0e-6, 2.8e-6, 4.0e-6, 0.75
# Seconds in which a proxy posts an LL message to the network: in tuning.cc 1 us on Intel's processors, 2 us on AMD's.
POST_S = 1.5e-6


@dataclass(frozen=True)
class CollectiveCost:
    """The time of a collective by one algorithm and protocol."""

    # algorithm, protocol: NCCL's names of them
    algorithm: str
    protocol: str
    latency_s: float  # seconds of a collective of no bytes
    seconds: float  # seconds of this collective, ``latency_s`` included
    # the lowest latency of protocol Simple, from which `zeroshard.lab.predict.timeline` estimates how long late ranks
    # delay overlapping computation. It does not depend on the algorithm that is chosen, so that more bandwidth never
    # predicts a longer delay.
    held_s: float = 0.0


@dataclass(frozen=True)
class _Group:
    """The ranks of one collective: ``in_node`` of them in each of ``num_nodes`` nodes."""

    num_ranks: int
    in_node: int
    num_nodes: int

    @property
    def fewest(self) -> int:
        """Ranks in the last node, which may not be full: the other nodes reach it over only as many network links."""
        return self.num_ranks - (self.num_nodes - 1) * self.in_node


@dataclass(frozen=True)
class Cluster:
    """Ranks and the links between them; consecutive ranks are in the same node."""

    world_size: int  # number of all ranks
    ranks_per_node: int  # ranks of a full node
    within: Link  # the link between ranks of a node
    between: Link  # the link that each rank has to other nodes

    def collective_s(self, op: str, num_bytes: int, num_ranks: int, *, replicas: bool = False) -> float:
        """Seconds of one collective; arguments as for `fastest`."""
        return self.fastest(op, num_bytes, num_ranks, replicas=replicas).seconds

    def fastest(self, op: str, num_bytes: int, num_ranks: int, *, replicas: bool = False) -> CollectiveCost:
        """The fastest algorithm and protocol for a collective, and its time.

        Args:
            op: ``all_reduce``, ``reduce_scatter``, ``all_gather`` or ``all_to_all``.
            num_bytes: bytes of the unsharded buffer.
            num_ranks: number of participants: consecutive ranks, or with ``replicas`` one rank of each replica.
            replicas: whether the participants are the ranks that hold the same shard.
        """
        if num_ranks == 1:
            return CollectiveCost("none", "", 0.0, 0.0)
        if num_ranks == self.within.num_ranks and op in self.within.collectives:
            constant_s, s_per_byte = self.within.collectives[op]  # measured among this number of ranks
            return CollectiveCost("measured", "", constant_s, constant_s + num_bytes * s_per_byte, held_s=constant_s)
        group = self._group(num_ranks, replicas=replicas)
        if op == "all_to_all":
            return self._exchange(num_bytes, group)
        costs = list(self._costs(op, num_bytes, group))
        held_s = min((cost.latency_s for cost in costs if cost.protocol == "Simple"), default=0.0)
        return replace(min(costs, key=lambda cost: cost.seconds), held_s=held_s)

    def num_nodes(self, num_ranks: int, *, replicas: bool = False) -> int:
        """Number of nodes that a collective spans; arguments as for `fastest`."""
        return self._group(num_ranks, replicas=replicas).num_nodes

    def _group(self, num_ranks: int, *, replicas: bool) -> _Group:
        if not replicas:
            in_node = min(num_ranks, self.ranks_per_node)
            return _Group(num_ranks, in_node, -(-num_ranks // in_node))
        shard_size = max(self.world_size // num_ranks, 1)
        in_node = min(num_ranks, max(self.ranks_per_node // shard_size, 1))
        return _Group(num_ranks, in_node, -(-num_ranks // in_node))

    def _costs(self, op: str, num_bytes: int, group: _Group) -> Iterator[CollectiveCost]:
        """Yield the cost by each algorithm and protocol that the group can use; Simple's ring comes first."""
        yield self._ring(op, num_bytes, group)
        protocols = self._protocols(group)
        for inside, outside in protocols:
            yield self._ring_of(op, num_bytes, group, inside, outside)
        if op != "all_reduce":
            if protocols and group.in_node == 1:
                yield self._pat(num_bytes, group)
            return
        yield self._tree(num_bytes, group)
        for inside, outside in protocols:
            yield self._tree_of(num_bytes, group, inside, outside)
        if self.within.in_switch and group.num_nodes == 1 and group.in_node >= SWITCHED_RANKS:
            moved_s = num_bytes / self._switched_bytes_per_s(group.in_node)
            yield CollectiveCost("nvls", "Simple", SWITCH_CALL_S, SWITCH_CALL_S + moved_s)

    def _ring(self, op: str, num_bytes: int, group: _Group) -> CollectiveCost:
        """All ranks step together, so over several nodes every step takes as long as one between nodes."""
        slowest = self.between if group.num_nodes > 1 else self.within
        latency_s = slowest.call_s + _rounds(op) * (group.num_ranks - 1) * slowest.latency_s
        return CollectiveCost(
            "ring", "Simple", latency_s, latency_s + _sent(op, num_bytes, group) / self._bytes_per_s(group)
        )

    def _tree(self, num_bytes: int, group: _Group) -> CollectiveCost:
        """A chain in each node and two binary trees over nodes; with two nodes each sends the other all bytes once.

        The buffer is pipelined through the tree in pieces: small pieces pay more latencies, and large ones delay the
        first arrival. With the best size the two cost 2 sqrt(m d), divided by the root of the pieces in flight.
        """
        in_node, num_nodes = group.in_node, group.num_nodes
        depth_s = 2 * (in_node - 1) * self.within.latency_s
        depth_s += 2 * math.log2(num_nodes) * self.between.tree_steps * self.between.latency_s
        if self.within.in_switch and in_node >= SWITCHED_RANKS:
            moved_s = num_bytes / self._switched_bytes_per_s(in_node)
        else:
            moved_s = 2 * num_bytes / self._inside_bytes_per_s(in_node)
        if num_nodes > 1:
            moved_s = max(moved_s, min(num_nodes - 1, 2) * num_bytes / self._outside_bytes_per_s(group))
        call_s = self.between.call_s if num_nodes > 1 else self.within.call_s
        pieces_s = 2 * math.sqrt(moved_s * depth_s / (self.between.window if num_nodes > 1 else self.within.window))
        return CollectiveCost("tree", "Simple", call_s + depth_s, call_s + depth_s + moved_s + pieces_s)

    def _protocols(self, group: _Group) -> list[tuple[Protocol | None, Protocol | None]]:
        """The protocols for small messages that all of the group's links have, as (within a node, between nodes)."""
        inside = {each.name: each for each in self.within.protocols} if group.in_node > 1 else None
        outside = {each.name: each for each in self.between.protocols} if group.num_nodes > 1 else None
        if inside is None or outside is None:
            return [(None, each) for each in (outside or {}).values()] + [
                (each, None) for each in (inside or {}).values()
            ]
        return [(inside[name], outside[name]) for name in inside if name in outside]

    def _ring_of(
        self, op: str, num_bytes: int, group: _Group, inside: Protocol | None, outside: Protocol | None
    ) -> CollectiveCost:
        """A ring by a protocol for small messages. If each node has one rank, nothing hides the network's latency."""
        protocol = outside or inside
        assert protocol is not None
        num_between = group.num_nodes - 1 if outside is not None else 0
        latency_s = protocol.call_s
        if outside is not None:
            step_s = outside.tree_step_s if group.in_node == 1 else outside.ring_step_s
            latency_s += _rounds(op) * num_between * step_s
        if inside is not None:
            step_s = inside.ring_step_s if outside is None else max(inside.ring_step_s, POST_S)
            latency_s += _rounds(op) * (group.num_ranks - 1 - num_between) * step_s
        rate = min(protocol.bytes_per_s, protocol.ring_share * self._bytes_per_s(group))
        return CollectiveCost("ring", protocol.name, latency_s, latency_s + _sent(op, num_bytes, group) / rate)

    def _tree_of(
        self, num_bytes: int, group: _Group, inside: Protocol | None, outside: Protocol | None
    ) -> CollectiveCost:
        protocol = outside or inside
        assert protocol is not None
        latency_s = protocol.call_s
        if inside is not None:
            latency_s += 2 * (group.in_node - 1) * inside.tree_step_s
        if outside is not None:
            latency_s += 2 * math.log2(group.num_nodes) * outside.tree_step_s
        rate = min(protocol.bytes_per_s, protocol.tree_share * self._bytes_per_s(group))
        return CollectiveCost("tree", protocol.name, latency_s, latency_s + 2 * num_bytes / rate)

    def _pat(self, num_bytes: int, group: _Group) -> CollectiveCost:
        latency_s = PAT_CALL_S + group.num_ranks * PAT_RANK_S + math.log2(group.num_nodes) * PAT_LEVEL_S
        moved_s = _sent("all_gather", num_bytes, group) / (PAT_SHARE * self._bytes_per_s(group))
        return CollectiveCost("pat", "Simple", latency_s, latency_s + moved_s)

    def _exchange(self, num_bytes: int, group: _Group) -> CollectiveCost:
        """An all-to-all: each rank sends a part to every other rank at once, over the link that leads there.

        Parts for other nodes use all network links of the node, whichever GPU is attached to them (NCCL's PXN: a part
        goes by NVLink to the GPU of the right rail).
        """
        part, slowest = num_bytes / group.num_ranks, self.between if group.num_nodes > 1 else self.within
        moved_s = part * (group.in_node - 1) / self._inside_bytes_per_s(2)
        if group.num_nodes > 1:
            link = self._outside_bytes_per_s(group) / group.fewest
            moved_s = max(moved_s, part * (group.num_ranks - group.fewest) / link)
        latency_s = slowest.call_s + slowest.latency_s
        return CollectiveCost("exchange", "Simple", latency_s, latency_s + moved_s, held_s=latency_s)

    def _bytes_per_s(self, group: _Group) -> float:
        """Bandwidth of a ring's bottleneck: a link within a node, or the network links of a node together."""
        inside = self._inside_bytes_per_s(group.in_node)
        return inside if group.num_nodes == 1 else min(inside, self._outside_bytes_per_s(group))

    def _inside_bytes_per_s(self, in_node: int) -> float:
        return math.inf if in_node == 1 else self.within.bytes_per_s * self.within.share

    def _outside_bytes_per_s(self, group: _Group) -> float:
        """Bandwidth to other nodes of the group's ranks in one node together.

        It is that of the node with the fewest ranks: each of NCCL's rings uses a link of every node, so there are only
        as many rings as that node has links.
        """
        return group.fewest * self.between.bytes_per_s * self.between.share

    def _switched_bytes_per_s(self, in_node: int) -> float:
        """Bytes of a buffer that the switches reduce per second: each rank sends all of it, and its part of the sum."""
        return self.within.bytes_per_s * self.within.in_switch * in_node / (in_node + 1)

    @property
    def stragglers(self) -> float:
        """Time of computation relative to one node's: it grows because every step waits for the slowest node."""
        return 1.0 + STRAGGLING * math.log2(max(self.world_size / self.ranks_per_node, 1.0))

    def slowing_s(self, message: Message) -> float:
        """Seconds by which a collective slows the computation that it overlaps with; 0 if that was not measured."""
        if message.world_size != self.within.num_ranks or message.op not in self.within.beside:
            return 0.0
        constant_s, s_per_byte = self.within.beside[message.op]
        return constant_s + message.num_bytes * s_per_byte


def _rounds(op: str) -> int:
    """How many times the data goes round a ring."""
    return 2 if op == "all_reduce" else 1


def _sent(op: str, num_bytes: int, group: _Group) -> float:
    """Bytes that a rank sends in a ring."""
    return _rounds(op) * (group.num_ranks - 1) / group.num_ranks * num_bytes
