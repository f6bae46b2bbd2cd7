"""How a rank joins the others and leaves them: the store where they meet, and torch.distributed's default group."""

from __future__ import annotations

import gc
from datetime import timedelta
from typing import TYPE_CHECKING

from zeroshard.launch.environment import World, has_launcher, num_restarts, variable

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

COLLECTIVE_TIMEOUT_S = 600.0


def meet(world: World, timeout_s: float = COLLECTIVE_TIMEOUT_S) -> dist.Store:
    """The store at which the ranks of `world` meet, before they have a process group.

    Args:
        world: whose rank this is; its address where it has more than one.
        timeout_s: how long this rank waits for what another one leaves there.
    """
    import torch.distributed as dist

    from zeroshard.launch.meeting_store import open_store

    if world.world_size == 1:
        return dist.HashStore()
    # under an elastic agent the store at this address may be the agent's, and rank 0 must not open another
    agent_has_it = variable("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not agent_has_it
    address = world.master_addr, world.master_port
    store = open_store(*address, serves=serves, timeout_s=timeout_s, world_size=world.world_size)
    # the store may have served an earlier attempt; ranks of our own launcher have a new one each time
    attempt = 0 if has_launcher() else num_restarts()
    return dist.PrefixStore(f"zeroshard/{attempt}", store)


def init_process_group(
    world: World, device: torch.device, timeout_s: float = COLLECTIVE_TIMEOUT_S, store: dist.Store | None = None
) -> dist.Store:
    """Join the ranks of `world` as torch.distributed's default group, also where there is but one.

    Args:
        world: whose rank this is; its address where it has more than one.
        device: where the model lives. CUDA: NCCL for its tensors and gloo for the CPU's; else gloo.
        timeout_s: after which a collective that a peer never joined fails.
        store: where the ranks have met; None: they do so now.

    Returns:
        The store at which the ranks have met.
    """
    import torch.distributed as dist

    on_cuda = device.type == "cuda"
    store = store or meet(world, timeout_s)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_cuda else None,
    )
    return store


def shutdown() -> None:
    """Leave the default group, if there is one.

    gloo's worker threads abort the process at exit if anything still holds their work: collecting before and
    after is what keeps the exit clean.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    gc.collect()
    dist.destroy_process_group()
    gc.collect()
