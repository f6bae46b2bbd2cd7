"""How long a step takes: one rank's actions laid out in time, by a small discrete-event simulation.

There are two clocks, and they are the engine's on a GPU: the stream that computes, and for each group of ranks the one
on which collectives run one after the other. A collective begins when what was computed before it is done and the one
before it is over; a wait holds computation until it ends, and what it holds it for is *exposed* communication. On a
CPU the cores that compute move the bytes too: a link that was measured says for how many seconds of computation a
collective takes the cores away, and while it is under way what is computed beside it goes on with the rest of them.

An operation takes the longest of its FLOPs over the device's rate, its bytes over the memory's, and the least time of a
kernel, which on a CPU comes on top: nobody issues the next one meanwhile (Williams et al. 2009, "Roofline",
https://doi.org/10.1145/1498765.1498785). A collective takes a latency for each step of its algorithm and its bytes over
the slowest link (Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH",
https://doi.org/10.1177/1094342005051521; ring and double binary tree as NCCL reckons them, src/graph/tuning.cc)::

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
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from zeroshard.lab.predict.actions import Action, Compute, Issue, Message, Step, Wait
from zeroshard.lab.predict.hardware import Device, Link
from zeroshard.lab.predict.rates import HOST_S, SUSTAINED, Attention, Software, sustained_s
from zeroshard.lab.predict.work import Work

Algorithm = Literal["auto", "ring", "tree", "nvls"]
# Fitted, see docs/plan-accuracy.md: of computation, for each doubling of the nodes; of a collective's latency, which
# grows with its ranks, what computation waits for although it runs beside.
STRAGGLING, LATENCY_HELD = 0.01, 0.1
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


@dataclass(frozen=True)
class TimedSpan:
    """What happens from ``start_s`` to ``end_s``, seconds from the start of the step: ``compute``, ``comm`` or
    ``wait``; ``name``: of a collective, its operation and buffer.
    """

    kind: Literal["compute", "comm", "wait"]
    unit: str
    phase: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0


@dataclass
class Timing:
    """A step's time.

    Attributes:
        step_s: from the first operation of its first forward to the end of the optimizer's step.
        compute_s: of that, seconds in which the rank computes; the rest is ``exposed_s``.
        comm_s: seconds in which collectives run, hidden or not.
        exposed_s: seconds in which computation stands still for them.
        bound_s: seconds of computation by what limits them: ``flops``, ``bytes`` or ``kernels`` (their least time).
        exposed_by: seconds by unit, kind and phase: ``blocks.3/weights/backward``, as runs report them.
        spans: of one micro-batch of each kind and the update, in order; empty unless they were asked for.
    """

    step_s: float = 0.0
    compute_s: float = 0.0
    comm_s: float = 0.0
    exposed_s: float = 0.0
    bound_s: dict[str, float] = field(default_factory=dict)
    exposed_by: dict[str, float] = field(default_factory=dict)
    spans: list[TimedSpan] = field(default_factory=list)


def simulate(
    step: Step, device: Device, cluster: Cluster, *, software: Software | None = None, with_spans: bool = False
) -> Timing:
    """Lay ``step`` out in time; ``software``: who computes, on a device of which more than rates is known."""
    clock = _Clock(device, cluster, software or Software(), with_spans=with_spans)
    for actions, times in ((step.first, 1), (step.middle, step.num_middle), (step.last, 1), (step.update, 1)):
        if actions and times:
            clock.run(actions, times)
    return clock.timing()


def operation_s(work: Work, device: Device, attention: Attention = "flash-2") -> tuple[float, str]:
    """Seconds of one operation, and what limits it: ``flops``, ``bytes`` or ``kernels``."""
    if device.sustained:
        return sustained_s(work, device, attention)
    rates = device.matmul_flops_per_s
    rate = rates.get(work.dtype) or rates.get("float32") or max(rates.values())
    share = device.attention_share if work.attention else device.matmul_share
    flops_s = work.flops / (rate * share)
    bytes_s = work.num_bytes / (device.bytes_per_s * device.memory_share)
    longest = max(flops_s, bytes_s, device.kernel_s)
    limit = "flops" if longest == flops_s else "bytes" if longest == bytes_s else "kernels"
    if device.device_type == "cpu":
        return _on_cpu_s(work, device, flops_s, bytes_s), limit
    return longest, limit


def _on_cpu_s(work: Work, device: Device, flops_s: float, bytes_s: float) -> float:
    """Nobody issues the next operation while one runs; and a product's factors come from memory, where those of a
    calibration, which takes the same product again and again, lie in a cache.
    """
    busy_s = flops_s + bytes_s if work.shape and not work.attention else max(flops_s, bytes_s)
    return max(busy_s, work.num_gelus * device.gelu_s) + device.kernel_s


class _Running:
    """A collective under way."""

    def __init__(self, issue: Issue, seconds: float, slowing_s: float) -> None:
        self.issue = issue
        self.seconds = seconds  # while nobody computes
        self.beside_s = max(seconds, slowing_s)  # while somebody does
        self.share = slowing_s / self.beside_s if slowing_s else 0.0  # of the cores, which it takes from who does
        self.left = 1.0
        self.start_s = 0.0


class _Clock:
    def __init__(self, device: Device, cluster: Cluster, software: Software, *, with_spans: bool) -> None:
        self._device, self._cluster, self._with_spans = device, cluster, with_spans
        sustained = SUSTAINED.get(device.sustained)
        self._attention = software.attention
        self._host_s = HOST_S[software.impl] if sustained else 0.0
        self._stretch = cluster.stragglers if sustained else 1.0
        self._beside = sustained.beside if sustained else 0.0
        self._now = 0.0
        self._compute_s = self._comm_s = self._exposed_s = 0.0
        self._bound: defaultdict[str, float] = defaultdict(float)
        self._exposed_by: defaultdict[str, float] = defaultdict(float)
        self._streams: dict[bool, deque[_Running]] = {False: deque(), True: deque()}  # by whether replicas talk
        self._running: dict[int, _Running] = {}
        self._known: dict[int, tuple[tuple[Work, ...], float, Mapping[str, float]]] = {}
        self._spans: list[TimedSpan] = []

    def run(self, actions: Iterable[Action], times: int) -> None:
        """Run ``actions`` once and count them ``times`` times."""
        before = (self._now, self._compute_s, self._comm_s, self._exposed_s)
        bound, exposed = dict(self._bound), dict(self._exposed_by)
        for action in actions:
            if isinstance(action, Compute):
                self._compute(action)
            elif isinstance(action, Issue):
                self._issue(action)
            else:
                self._wait(action)
        more = times - 1
        self._now += more * (self._now - before[0])
        self._compute_s += more * (self._compute_s - before[1])
        self._comm_s += more * (self._comm_s - before[2])
        self._exposed_s += more * (self._exposed_s - before[3])
        for total, old in ((self._bound, bound), (self._exposed_by, exposed)):
            for key in total:
                total[key] += more * (total[key] - old.get(key, 0.0))

    def _compute(self, action: Compute) -> None:
        seconds, bound = self._seconds(action.work)
        for key, value in bound.items():
            self._bound[key] += value
        self._compute_s += seconds
        start, left = self._now, seconds
        while heads := [stream[0] for stream in self._streams.values() if stream and stream[0].share]:
            rate = max(1.0 - sum(head.share for head in heads), 0.0)
            until = min(head.left * head.beside_s for head in heads)
            if left <= until * rate:
                self._expose(heads[0], action.phase, left / rate - left)
                self._pass(left / rate, computing=True)
                left = 0.0
                break
            self._expose(heads[0], action.phase, until * (1.0 - rate))
            self._pass(until, computing=True)
            left -= until * rate
        self._pass(left, computing=True)
        self._note("compute", action.unit, action.phase, "", start, self._now)

    def _seconds(self, work: tuple[Work, ...]) -> tuple[float, Mapping[str, float]]:
        known = self._known.get(id(work))
        if known is None:
            bound: defaultdict[str, float] = defaultdict(float)
            for each in work:
                seconds, limit = operation_s(each, self._device, self._attention)
                bound[limit] += seconds * self._stretch
            host_s = len(work) * self._host_s
            if host_s > sum(bound.values()):
                bound["kernels"] += host_s - sum(bound.values())
            known = (work, sum(bound.values()), bound)  # holds the tuple, so that its id stays its own
            self._known[id(work)] = known
        return known[1], known[2]

    def _issue(self, action: Issue) -> None:
        message = action.message
        seconds = self._cluster.collective_s(
            message.op, message.num_bytes, message.world_size, replicas=action.replicas
        )
        running = _Running(action, seconds, self._cluster.slowing_s(message) or self._beside_s(action, seconds))
        running.start_s = self._now  # later if others are before it
        self._running[action.number] = running
        self._streams[action.replicas].append(running)
        self._comm_s += seconds

    def _beside_s(self, action: Issue, seconds: float) -> float:
        """What computation loses beside a collective of ``seconds``; ranks that are late hold it up by its latency."""
        if not self._beside:
            return 0.0
        message = action.message
        latency_s = self._cluster.collective_s(message.op, 0, message.world_size, replicas=action.replicas)
        return self._beside * seconds + LATENCY_HELD * latency_s

    def _wait(self, action: Wait) -> None:
        running = self._running.pop(action.number, None)
        if running is None:
            return  # a collective of one rank
        stream = self._streams[running.issue.replicas]
        held = 0.0
        if running in stream:
            before = list(stream)[: stream.index(running) + 1]
            held = sum(each.left * each.seconds for each in before)
        if held:
            start = self._now
            kind = self._expose(running, action.phase, held)
            self._pass(held, computing=False)
            self._note("wait", action.unit, action.phase, kind, start, self._now)

    def _expose(self, running: _Running, phase: str, seconds: float) -> str:
        """Count ``seconds`` without computation for ``running``, under the name that is returned."""
        message = running.issue.message
        kind = message.buffer if running.issue.control else f"{message.buffer}/{message.phase}/{phase}"
        if seconds:
            self._exposed_by[kind] += seconds
            self._exposed_s += seconds
        return kind

    def _pass(self, seconds: float, *, computing: bool) -> None:
        """Let time pass, in which each stream's collectives go on one after the other."""
        end = self._now + seconds
        for stream in self._streams.values():
            at = self._now
            while stream:
                running = stream[0]
                whole = running.beside_s if computing else running.seconds
                over = at + running.left * whole
                if over > end + 1e-12:  # of a second: rounding leaves no crumbs
                    running.left -= (end - at) / whole
                    break
                at, running.left = over, 0.0
                message = running.issue.message
                name = f"{message.op} {message.buffer}/{message.phase}"
                issue = running.issue
                self._note("comm", issue.unit, issue.phase, name, running.start_s, at, message.num_bytes)
                stream.popleft()
                if stream:
                    stream[0].start_s = max(stream[0].start_s, at)
        self._now = end

    def _note(
        self,
        kind: Literal["compute", "comm", "wait"],
        unit: str,
        phase: str,
        name: str,
        start: float,
        end: float,
        num_bytes: int = 0,
    ) -> None:
        if self._with_spans:
            self._spans.append(TimedSpan(kind, unit, phase, name, start, end, num_bytes))

    def timing(self) -> Timing:
        return Timing(
            self._now,
            self._compute_s,
            self._comm_s,
            self._exposed_s,
            dict(self._bound),
            dict(self._exposed_by),
            self._spans,
        )
