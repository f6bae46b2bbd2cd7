"""How a rank joins and leaves the others: the rendezvous store, and torch.distributed's default group."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import TYPE_CHECKING

from zeroshard.host.launch.environment import World, has_launcher, num_restarts, variable
from zeroshard.host.launch.forked import is_forked

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 600.0


def meet(world: World, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> dist.Store:
    """Return the store at which the ranks of `world` meet, before they have a process group.

    Args:
        world: this rank's place in the world, with the address of the store if there are several ranks.
        timeout_s: timeout of requests to the store, which may wait for a key that another rank sets.
    """
    import torch.distributed as dist

    from zeroshard.host.launch.bound_tcp_store import open_store

    if world.world_size == 1:
        return dist.HashStore()
    # an elastic agent may serve the store at this address; then rank 0 must not open another
    agent_has_it = variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not agent_has_it
    address = world.master_addr, world.master_port
    store = open_store(*address, serves=serves, timeout_s=timeout_s, world_size=world.world_size)
    # the store may have keys of an earlier attempt, hence the prefix; our own launcher makes a new store each time
    attempt = 0 if has_launcher() else num_restarts()
    return dist.PrefixStore(f"zeroshard/{attempt}", store)


def init_process_group(world: World, device: torch.device, store: dist.Store | None = None) -> dist.Store:
    """Join the ranks of `world` in torch.distributed's default group, even if there is only one rank.

    Args:
        world: this rank's place in the world, with the address of the store if there are several ranks.
        device: the model's device. On CUDA, NCCL moves CUDA tensors and gloo CPU tensors; else gloo moves all. Without
            an index NCCL connects at its first collective.
        store: the store at which the ranks have met; None: call `meet` now.

    Returns:
        The store at which the ranks have met.
    """
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    store = store or meet(world, COLLECTIVE_TIMEOUT_S)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        device_id=device if on_cuda and device.index is not None else None,
    )
    return store


def shutdown() -> None:
    """Leave the default group, if there is one.

    gloo's worker threads abort the process at exit if anything still references their work handles. To prevent that,
    garbage is collected before and after, which takes half a second. A forked rank exits without destructors.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    if is_forked():
        dist.destroy_process_group()
        return
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
