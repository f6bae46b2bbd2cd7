"""The link that a run asks for: how its ranks come behind it, and what it was found to be.

Three ways, one configuration. ``simulated`` wraps the communicator. ``netns`` puts each node's ranks into a network
namespace that the launcher has made, and ``tc`` has them talk through an interface that somebody has shaped; in both
the kernel does the slowing, and whoever talks through it is slow: our ring, gloo, PyTorch's own strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.comm import Communicator, Link, RingCommunicator, ThrottledCommunicator
from zeroshard.comm.probe import probe, why_not_comparable
from zeroshard.comm.shm.shm import ranks_share_host
from zeroshard.errors import UserError
from zeroshard.launch.environment import World, enter_node, use_interface
from zeroshard.train.config.sections import LinkConfig
from zeroshard.train.config.sizes import parse_bandwidth, parse_duration, parse_size


@dataclass(frozen=True)
class Links:
    """A run's links as numbers.

    Attributes:
        mode: as `LinkConfig`.
        between: of a node, in each direction.
        inside: between the ranks of a node.
        node_size: neighbouring ranks that are a node.
        device: the interface of mode ``tc``.
    """

    mode: str
    between: Link
    inside: Link
    node_size: int
    device: str

    @classmethod
    def of(cls, config: LinkConfig) -> Links:
        """The links that a configuration asks for."""
        burst_bytes = parse_size("link.burst", config.burst) if config.burst else 0
        between = _link("", config.bandwidth, config.latency, burst_bytes)
        inside = _link("inside_", config.inside_bandwidth, config.inside_latency)
        return cls(config.mode, between, inside, config.node_size, config.device)

    @property
    def in_kernel(self) -> bool:
        """Whether what slows these links is the kernel, and so sees what passes through it alone."""
        return self.mode in ("netns", "tc")

    @property
    def memory_goes_around(self) -> bool:
        """Whether ranks that share memory would go around these links; nodes of ``netns`` are hosts, and do not."""
        return self.mode == "tc"

    def enter(self, world: World) -> None:
        """Bring this process behind its link, before it connects to anybody.

        Raises:
            UserError: there are no namespaces, or no such interface.
        """
        if self.mode == "netns":
            enter_node(world.local_rank)
        elif self.mode == "tc":
            use_interface(self.device)

    def slow(self, comm: Communicator, device: torch.device) -> Communicator:
        """``comm`` behind simulated links, or itself. Collective.

        Raises:
            UserError: tensors on a GPU, or ranks on several hosts.
        """
        if self.mode != "simulated" or comm.world_size == 1:
            return comm
        if device.type != "cpu":
            what = f"simulated delays CPU tensors, and this run is on {device}"
            raise UserError("link.mode", what, "use --device cpu, or --link.mode tc")
        if not ranks_share_host():
            what = "simulated needs the clock of one host, and these ranks are on several"
            raise UserError("link.mode", what, "use --link.mode tc")
        return ThrottledCommunicator(comm, self.between, node_size=self.node_size, inside=self.inside)

    def probed(self, comm: Communicator) -> dict[str, Any]:
        """What was asked and what a probe achieved, for the record; empty where no link is slowed. Collective.

        Only the first rank of each node knows what was achieved.
        """
        if self.mode == "none" or comm.world_size <= self.node_size:
            return {}
        if self.in_kernel and not isinstance(comm, RingCommunicator):
            ring = RingCommunicator()  # gloo's own collectives do not fill a link: that is theirs, and no fault of it
            achieved = probe(ring, self.between, self.node_size)
            ring.close()
        else:
            achieved = probe(comm, self.between, self.node_size)
        if achieved is None:
            return {}
        why = why_not_comparable(self.between, achieved)
        return {
            "mode": self.mode,
            "node_size": self.node_size,
            "asked_bytes_per_s": self.between.bytes_per_s,  # infinite: as it is; null in a log
            "achieved_bytes_per_s": achieved.bytes_per_s,
            "asked_latency_s": self.between.latency_s,
            "achieved_latency_s": achieved.latency_s,
            "probe_s": achieved.seconds,
            "comparable": not why,
            "why_not_comparable": why,
        }


def _link(prefix: str, bandwidth: str, latency: str, burst_bytes: int = 0) -> Link:
    bytes_per_s = parse_bandwidth(f"link.{prefix}bandwidth", bandwidth) if bandwidth else math.inf
    latency_s = parse_duration(f"link.{prefix}latency", latency) if latency else 0.0
    return Link(latency_s, bytes_per_s, burst_bytes)
