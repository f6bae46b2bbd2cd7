"""Slowed links between nodes: puts this rank behind the link that a run asks for, and measures the result.

There are two modes. ``simulated`` wraps the communicator. ``netns`` puts each node's ranks into a network namespace
that the launcher created; there the kernel slows the traffic, and so everything that uses the network: our ring, gloo,
PyTorch's own strategies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.comm.base import Communicator
from zeroshard.comm.probe import probe, why_not_comparable
from zeroshard.comm.ring.ring import RingCommunicator
from zeroshard.comm.shm.shm import ranks_share_host
from zeroshard.comm.wrappers.throttle import Link, ThrottledCommunicator
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World, enter_node
from zeroshard.settings.sizes import parse_bandwidth, parse_duration, parse_size
from zeroshard.settings.tables import LinkConfig


@dataclass(frozen=True)
class Links:
    """A run's links, parsed into numbers."""

    mode: str  # as in `LinkConfig`
    between: Link  # a node's link to other nodes, in each direction
    node_size: int  # neighbouring ranks that form a node

    @classmethod
    def of(cls, config: LinkConfig) -> Links:
        """Parse the links that a configuration asks for."""
        bytes_per_s = parse_bandwidth("link.bandwidth", config.bandwidth) if config.bandwidth else math.inf
        latency_s = parse_duration("link.latency", config.latency) if config.latency else 0.0
        between = Link(latency_s, bytes_per_s, parse_size("link.burst", config.burst) if config.burst else 0)
        return cls(config.mode, between, config.node_size)

    def enter(self, world: World) -> None:
        """Move this process behind its link; must be called before it connects to any other rank.

        Raises:
            UserError: the network namespaces do not exist.
        """
        if self.mode == "netns":
            enter_node(world.local_rank)

    def slow(self, comm: Communicator, device: torch.device) -> Communicator:
        """Wrap ``comm`` in simulated links; in other modes, or with one rank, return it unchanged. Collective.

        Raises:
            UserError: links are simulated, and tensors are on a GPU or the ranks on several hosts.
        """
        if self.mode != "simulated" or comm.world_size == 1:
            return comm
        if device.type != "cpu":
            what = f"simulated delays CPU tensors, and this run is on {device}"
            raise UserError("link.mode", what, "use --device cpu")
        if not ranks_share_host():
            what = "simulated needs the clock of one host, and these ranks are on several"
            raise UserError("link.mode", what, "slow their network by its own means")
        return ThrottledCommunicator(comm, self.between, node_size=self.node_size)

    def probed(self, comm: Communicator) -> dict[str, Any]:
        """Measure the links; return the requested and the achieved speed for the log. Collective.

        Returns an empty dict if no link is slowed, and on every rank but the first of each node.
        """
        if self.mode == "none" or comm.world_size <= self.node_size:
            return {}
        in_kernel = self.mode == "netns"
        if in_kernel and not isinstance(comm, RingCommunicator):
            ring = RingCommunicator()  # gloo's collectives do not saturate a link, so they cannot measure it
            achieved = probe(ring, self.between, self.node_size, ring_messages=True)
            ring.close()
        else:
            achieved = probe(comm, self.between, self.node_size, ring_messages=in_kernel)
        if achieved is None:
            return {}
        why = why_not_comparable(self.between, achieved)
        return {
            "mode": self.mode,
            "node_size": self.node_size,
            "asked_bytes_per_s": self.between.bytes_per_s,  # infinite if not limited, which a log has as null
            "achieved_bytes_per_s": achieved.bytes_per_s,
            "asked_latency_s": self.between.latency_s,
            "achieved_latency_s": achieved.latency_s,
            "probe_s": achieved.seconds,
            "comparable": not why,
            "why_not_comparable": why,
        }
