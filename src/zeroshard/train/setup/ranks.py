"""Connects this rank with the others: builds the run's communicator, wraps it, and registers how to close it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from zeroshard.comm import BlockingCommunicator, Communicator, LocalCommunicator
from zeroshard.comm.links import Links
from zeroshard.comm.registry import COMMUNICATORS, comm_entry
from zeroshard.comm.rendezvous import meet_alike
from zeroshard.comm.shm.mapped import CAN_SHARE
from zeroshard.comm.shm.shm import ranks_share_host
from zeroshard.comm.wrappers.sentinel import SentinelCommunicator, StoreBoard
from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import World
from zeroshard.host.launch.process_group import init_process_group, shutdown
from zeroshard.host.launch.rank_exit import end_as_peer_lost
from zeroshard.parallel import strategy_entry


class Joined(NamedTuple):
    """This rank's communicator, and the measured speed of its links (see `Links.probed`)."""

    comm: Communicator
    link: Mapping[str, Any]


def join(
    world: World,
    wanted: str,
    strategy: str,
    device: torch.device,
    stack: ExitStack,
    facts: Mapping[str, object] | None = None,
    links: Links | None = None,
    *,
    overlap: bool = True,
) -> Joined:
    """Connect to the other ranks and return the communicator; closing ``stack`` disconnects again. Collective.

    ``wanted`` is a name of `zeroshard.comm.registry`, ``module:name``, or ``auto``: NCCL on GPUs; on CPUs shared memory
    if all ranks are on one host, else the ring. PyTorch's own strategies use `torch.distributed` in any case. ``facts``
    must be the same on every rank, such as settings and versions. Without ``overlap`` each collective blocks.

    Raises:
        UserError: a rank has other facts; ring or shared memory for tensors on a GPU; shared memory among several
            hosts; the links are not available.
        PeerError: a rank did not connect.
    """
    stack.callback(shutdown)
    named = None if wanted == "auto" else comm_entry(wanted)
    if world.world_size == 1 and not (named and named.alone) and not strategy_entry(strategy).needs_group:
        return Joined(LocalCommunicator(), {})
    if device.type != "cpu" and named is not None and named.cpu_only:
        raise UserError("comm", f"{wanted} moves CPU tensors, and this run is on {device}", "use auto or torch")
    if links is not None:
        links.enter(world)
    store = meet_alike(world, facts)
    init_process_group(world, device, store=store)
    comm = (named or COMMUNICATORS[choose(strategy, device)])()
    close = getattr(comm, "close", None)
    if close is not None:
        stack.callback(close)
    found: Mapping[str, Any] = {}
    if links is not None:
        comm = links.slow(comm, device)
        # The probe issues different collectives on the ranks of a node, so it must run before the sentinel watches.
        found = links.probed(comm)
    if world.world_size > 1:
        comm = SentinelCommunicator(comm, StoreBoard(store), end_as_peer_lost)
        stack.callback(comm.close)
    if not overlap:
        comm = BlockingCommunicator(comm)
    return Joined(comm, found)


def choose(strategy: str, device: torch.device) -> str:
    """Return the communicator that ``auto`` means in an initialised world of several ranks. Collective."""
    if device.type != "cpu" or strategy_entry(strategy).over_torch:
        return "torch"
    return "shm" if CAN_SHARE and ranks_share_host() else "ring"
