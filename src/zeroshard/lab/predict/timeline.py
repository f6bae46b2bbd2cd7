"""Predicts how long a step takes: a small discrete-event simulation of one rank's actions.

As in the engine on a GPU, there is a stream that computes, and for each group of ranks a stream on which collectives
run one after the other. A collective starts when the computation issued before it is done and the previous collective
of its stream has ended. A wait blocks computation until its collective ends; that time is *exposed* communication. On a
CPU the same cores compute and move bytes: a measured link has the seconds of computation that a collective costs, and
while it is in flight, overlapping computation continues with the remaining share of the cores.

An operation takes the longest of its FLOPs over the device's rate, its bytes over the memory's, and the least time of a
kernel (Williams et al. 2009, "Roofline", https://doi.org/10.1145/1498765.1498785). On a CPU the least time of a kernel
is added instead, because no operation is issued while another runs. `zeroshard.lab.predict.cluster` has the time of a
collective.

[Note: The host runs ahead]
    On a GPU that was measured, ``kernel_s`` is the time in which the host issues an operation: Python and autograd. The
    host issues one operation after the other and does not wait for the device, so the device waits only where it has
    done all that was issued. A step of a small model takes as long as its host. To hand a parameter's gradient to the
    engine costs the host as much as an operation. An H100's host takes 49 us for each, and so planned 33.5 ms for a
    micro-batch of GPT-2 124M, of 535 operations and 148 gradients; measured were 36.8.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zeroshard.lab.predict.actions import Action, Compute, Issue, Step, Wait
from zeroshard.lab.predict.cluster import Cluster, CollectiveCost
from zeroshard.lab.predict.conversions import conversion_s
from zeroshard.lab.predict.hardware import Device
from zeroshard.lab.predict.rates import (
    HOST_S,
    MEASURED_ATTENTION,
    SUSTAINED,
    WIDTHS_CUDNN,
    Attention,
    Software,
    attention_share,
    sustained_s,
)
from zeroshard.lab.predict.work import Work
from zeroshard.train.profiling.devices import KERNEL_S

# Share of a collective's latency, which grows with its ranks, by which overlapping computation is delayed nevertheless.
# Fitted, see docs/plan-accuracy.md.
LATENCY_HELD = 0.1


@dataclass
class Timing:
    """The predicted times of a step."""

    step_s: float = 0.0  # seconds from the first operation of the first forward to the end of the optimizer's step
    compute_s: float = 0.0  # seconds of these in which the rank computes; the rest is ``exposed_s`` and ``host_s``
    comm_s: float = 0.0  # seconds in which collectives run, overlapped or not
    exposed_s: float = 0.0  # seconds for which computation waits for collectives (exposed communication)
    # seconds of computation by their limit: ``flops``, ``bytes``, ``kernels`` (the least time of a kernel) or ``wire``
    # (conversion to and from a wire format)
    bound_s: dict[str, float] = field(default_factory=dict)
    # seconds in which the rank quantises and dequantises, including those that overlap with computation
    wire_s: float = 0.0
    host_s: float = 0.0  # seconds for which computation waits for state that is off the device: its copies and updates
    num_operations: int = 0  # operations that the host issues; 0 unless the device is a GPU that was measured
    issue_s: float = 0.0  # seconds in which it issues them: [Note: The host runs ahead]


def simulate(step: Step, device: Device, cluster: Cluster, *, software: Software | None = None) -> Timing:
    """Simulate ``step``; ``software``: the kernels that compute, used only on a device of `SUSTAINED`."""
    clock = _Clock(device, cluster, software or Software())
    for actions, times in step.parts:
        if actions and times:
            clock.run(actions, times)
    return clock.timing()


def operation_s(work: Work, device: Device, attention: Attention = "flash-2") -> tuple[float, str]:
    """Seconds of one operation, and its limit: ``flops``, ``bytes``, ``kernels`` or, for a conversion, ``wire``."""
    if work.conversion:
        return conversion_s(work, device), "wire"
    if device.sustained:
        return sustained_s(work, device, attention)
    rate = device.rate(work.dtype)
    if work.layout is not None:
        rate *= device.matmul_layouts.get(work.dtype, {}).get(work.layout, 1.0)
    share, num_bytes = device.attention_share if work.attention else device.matmul_share, work.num_bytes
    if device.is_measured_gpu:
        num_bytes += work.lost_bytes
        if work.attention:
            there = attention_share(work.shape, backward=work.backward, widths=WIDTHS_CUDNN)
            share *= there / attention_share(MEASURED_ATTENTION)
    flops_s = work.flops / (rate * share)
    bytes_s = num_bytes / (device.bytes_per_s * device.memory_share)
    longest = max(flops_s, bytes_s, min(device.kernel_s, KERNEL_S))  # [Note: The host runs ahead]
    limit = "flops" if longest == flops_s else "bytes" if longest == bytes_s else "kernels"
    if device.device_type == "cpu":
        return _on_cpu_s(work, device, flops_s, bytes_s) * device.in_step, limit
    return longest, limit


def _on_cpu_s(work: Work, device: Device, flops_s: float, bytes_s: float) -> float:
    """Seconds of an operation on a CPU.

    The least time of a kernel is added, because no operation is issued while another runs. A product's bytes are added
    too: its factors come from memory, while the calibration repeats one product whose factors are in the cache.
    """
    if work.num_hooks:
        return work.num_hooks * device.hook_s
    busy_s = flops_s + bytes_s if work.shape and not work.attention else max(flops_s, bytes_s)
    return max(busy_s, work.num_gelus * device.gelu_s) + device.kernel_s


class _Running:
    """A collective in flight, with the computation that runs before it on its own stream."""

    def __init__(self, issue: Issue, seconds: float, slowing_s: float) -> None:
        self.issue = issue
        self.seconds = seconds  # its duration while the rank computes nothing
        self.beside_s = max(seconds, slowing_s)  # its duration while the rank computes
        self.share = slowing_s / self.beside_s if slowing_s else 0.0  # share of the cores that computation loses to it
        self.left = 1.0


class _Clock:
    def __init__(self, device: Device, cluster: Cluster, software: Software) -> None:
        self._device, self._cluster = device, cluster
        sustained = SUSTAINED.get(device.sustained)
        self._attention = software.attention
        self._host_s = HOST_S[software.impl] if sustained else 0.0
        self._stretch = cluster.stragglers if sustained else 1.0
        self._beside = sustained.beside if sustained else 0.0
        self._issue_s = device.kernel_s if device.device_type == "cuda" and not sustained else 0.0
        self._hooks_are_host_s = device.device_type == "cuda"
        self._issued = 0.0  # when the host has issued everything that has run
        self._num_operations = 0
        self._now = 0.0
        self._compute_s = self._comm_s = self._exposed_s = self._wire_s = 0.0
        self._bound: defaultdict[str, float] = defaultdict(float)
        self._streams: dict[str, deque[_Running]] = {}  # by `Issue.group`
        self._running: dict[int, _Running] = {}
        self._known: dict[int, tuple[tuple[Work, ...], float, Mapping[str, float]]] = {}

    def run(self, actions: Iterable[Action], times: int) -> None:
        """Run ``actions`` once and count them ``times`` times."""
        before = (self._now, self._compute_s, self._comm_s, self._exposed_s, self._wire_s, self._issued)
        num_before = self._num_operations
        bound = dict(self._bound)
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
        self._wire_s += more * (self._wire_s - before[4])
        self._issued += more * (self._issued - before[5])
        self._num_operations += more * (self._num_operations - num_before)
        for key in self._bound:
            self._bound[key] += more * (self._bound[key] - bound.get(key, 0.0))

    def _compute(self, action: Compute) -> None:
        if self._hooks_are_host_s and action.work[0].num_hooks:
            self._issue_operations(action)
            return
        seconds, bound = self._seconds(action.work)
        for key, value in bound.items():
            self._bound[key] += value
        self._compute_s += seconds
        self._wire_s += bound.get("wire", 0.0)
        left = seconds
        while heads := [stream[0] for stream in self._streams.values() if stream and stream[0].share]:
            rate = max(1.0 - sum(head.share for head in heads), 0.0)
            until = min(head.left * head.beside_s for head in heads)
            if left <= until * rate:
                self._exposed_s += left / rate - left
                self._pass(left / rate, computing=True)
                left = 0.0
                break
            self._exposed_s += until * (1.0 - rate)
            self._pass(until, computing=True)
            left -= until * rate
        self._pass(left, computing=True)
        self._issue_operations(action)

    def _issue_operations(self, action: Compute) -> None:
        """Wait for the host if it has not issued these operations: [Note: The host runs ahead]."""
        if not self._issue_s:
            return
        num_issued = sum(each.num_calls for each in action.work)
        self._num_operations += num_issued
        self._issued += num_issued * self._issue_s
        if (late_s := self._issued - self._now) > 0:
            self._bound["kernels"] += late_s
            self._compute_s += late_s
            self._pass(late_s, computing=False)

    def _seconds(self, work: tuple[Work, ...]) -> tuple[float, Mapping[str, float]]:
        known = self._known.get(id(work))
        if known is None:
            bound: defaultdict[str, float] = defaultdict(float)
            for each in work:
                seconds, limit = operation_s(each, self._device, self._attention)
                bound[limit] += seconds * self._stretch
            host_s = sum(each.num_calls for each in work) * self._host_s
            if host_s > sum(bound.values()):
                bound["kernels"] += host_s - sum(bound.values())
            known = (work, sum(bound.values()), bound)  # holds the tuple, so that its id stays its own
            self._known[id(work)] = known
        return known[1], known[2]

    def _issue(self, action: Issue) -> None:
        message = action.message
        cost = self._cluster.fastest(message.op, message.num_bytes, message.world_size, replicas=action.replicas)
        slowing_s = self._cluster.slowing_s(message) or self._beside_s(cost)
        # Quantising slows overlapping computation by its full duration.
        wire_s = self._seconds(action.work)[0] if action.work else 0.0
        self._wire_s += wire_s
        running = _Running(action, cost.seconds + wire_s, slowing_s + wire_s)
        self._running[action.number] = running
        self._streams.setdefault(action.group, deque()).append(running)
        self._comm_s += cost.seconds

    def _beside_s(self, cost: CollectiveCost) -> float:
        """Seconds that overlapping computation loses to a collective; late ranks delay it by a share of its latency."""
        return self._beside * cost.seconds + LATENCY_HELD * cost.held_s if self._beside else 0.0

    def _wait(self, action: Wait) -> None:
        running = self._running.pop(action.number, None)
        if running is None:
            return  # a collective of one rank
        stream = self._streams[running.issue.group]
        if running in stream:
            before = list(stream)[: stream.index(running) + 1]
            held = sum(each.left * each.seconds for each in before)
            self._exposed_s += held
            self._pass(held, computing=False)

    def _pass(self, seconds: float, *, computing: bool) -> None:
        """Advance the clock by ``seconds``, in which each stream's collectives run one after the other."""
        end = self._now + seconds
        for stream in self._streams.values():
            at = self._now
            while stream:
                running = stream[0]
                whole = running.beside_s if computing else running.seconds
                over = at + running.left * whole
                if over > end + 1e-12:  # tolerance for rounding errors, in seconds
                    running.left -= (end - at) / whole
                    break
                at, running.left = over, 0.0
                stream.popleft()
        self._now = end

    def timing(self) -> Timing:
        times = self._now, self._compute_s, self._comm_s, self._exposed_s
        issued = {"num_operations": self._num_operations, "issue_s": self._num_operations * self._issue_s}
        return Timing(*times, dict(self._bound), self._wire_s, **issued)
