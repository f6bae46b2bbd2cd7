"""How ranks that a launcher has started find each other: `meet_alike`, and `joined` for a loop of the user's own.

The ranks meet at a store before they have a process group, and compare what has to be the same on all of them: settings
decide which communicator is used. Each rank learns there which rank did not come, or differs.
"""

from __future__ import annotations

import atexit
import json
import logging
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

from zeroshard.comm.base import PeerError
from zeroshard.host.errors import UserError
from zeroshard.host.launch import environment
from zeroshard.host.launch.environment import World
from zeroshard.host.launch.process_group import COLLECTIVE_TIMEOUT_S, init_process_group, meet, shutdown

RENDEZVOUS_S = 100.0  # how long ranks of a run wait for the next rank to connect
JOIN_S = 600.0  # those of a user's own loop, where a rank may do other things before
HEARING_S = 10.0  # how long rank 0 keeps the store alive so that others can read why they are refused
_KINDS = ("code version", "torch version", "data", "model", "device")  # beginnings of facts that are no settings

_log = logging.getLogger("zeroshard.comm")
_ALONE = "give comm=LocalCommunicator() to train alone"
_TODO = f"call torch.distributed.init_process_group() first, or {_ALONE}"
Difference = tuple[str, str, str]  # a fact, what is wrong with it, and what to do
_lock = threading.Lock()  # ranks that are threads may ask at the same time
_num_joined = 0  # how often this process has joined: after `destroy_process_group` it may do so again


def joined(device: torch.device | None = None) -> bool:
    """Return whether `torch.distributed` has a default group; make it if a launcher has started several ranks.

    torchrun, srun and MPI only start processes. Without this each of them would train a model of its own. The first
    call is collective, makes the GPU of this rank current, and the process leaves the group when it exits.

    Args:
        device: where this rank's tensors are; None: not known. gloo moves CPU tensors, NCCL those of GPUs.

    Raises:
        RuntimeError: the launcher gives no address; ranks did not come within `JOIN_S`, have tensors on one GPU, or on
            GPUs and CPUs; this process was started by a rank, and is none.
    """
    with _lock:
        try:
            world = environment.world_from_env()
        except UserError as error:
            if dist.is_initialized():
                return True
            raise RuntimeError(f"{error.field}: {error.what}; set it, or {_TODO}") from None
        if dist.is_initialized():
            if world is not None and (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size):
                _require_rank(world)
            return True
        if world is None or world.world_size == 1:
            _warn_of_other_tasks()
            return False
        _require_rank(world)
        _join(world, device)
    return True


def default_group(device: torch.device | None = None) -> dist.ProcessGroup:
    """Return torch.distributed's default group, which `joined` has made if a launcher has started this process.

    Raises:
        RuntimeError: as `joined`; there is no group.
    """
    if not joined(device):
        raise RuntimeError(
            "torch.distributed is not initialised; call torch.distributed.init_process_group() first, "
            "or use LocalCommunicator() for one process"
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _require_rank(world: World) -> None:
    """Raise RuntimeError in a process that has a rank's variables, or its open connections, and is not that rank."""
    starter = environment.claim_rank(world)
    if get_worker_info() is not None:
        raise RuntimeError(f"a DataLoader's worker is no rank, and may not join the other ranks; {_ALONE}")
    if starter:
        what = f"this process was started by rank {world.rank} (process {starter}), and would join in its place"
        raise RuntimeError(f"{what}; {_ALONE}")


@cache
def _warn_of_other_tasks() -> None:
    """Warn once in a process."""
    num_tasks = environment.num_tasks_without_srun()
    if num_tasks > 1:
        _log.warning("SLURM has %d tasks for this job, but this process trains alone: srun did not start it", num_tasks)


@cache
def _store_of(world: World) -> dist.Store:
    """The store at which the ranks of ``world`` meet, for each group that this process joins."""
    return meet(world, JOIN_S)


def _join(world: World, device: torch.device | None) -> None:
    global _num_joined
    facts, differs = {"device": str(device and device.type), "torch version": str(torch.__version__)}, None
    at = f"{world.master_addr}:{world.master_port}"
    try:
        store = dist.PrefixStore(f"joined/{_num_joined}", _store_of(world))
        # without an index NCCL connects at its first collective, which ranks on CPUs never call
        device_of_group = torch.device("cuda" if torch.cuda.device_count() else "cpu")
        if device_of_group.type == "cuda" and (device is None or device.type == "cuda"):
            gpu = _take_gpu(world, device)
            if device is not None:
                device_of_group, differs = gpu, _other_on(gpu, world.rank, store)
        agree_at(dist.PrefixStore("agree", store), world.rank, world.world_size, facts, differs, JOIN_S)
        init_process_group(world, device_of_group, store=store)
    except UserError as error:
        raise RuntimeError(str(error)) from None
    except (RuntimeError, OSError) as error:
        why = str(error).partition("\n")[0]
        what = f"rank {world.rank} of {world.world_size} cannot join the others at {at}"
        raise RuntimeError(f"{what} ({why}); start all of them, or {_TODO}") from error
    _num_joined += 1
    atexit.register(shutdown)
    if world.rank == 0:
        backends = dist.get_backend_config()
        _log.info("torch.distributed: %d ranks over %s, which met at %s", world.world_size, backends, at)


def _take_gpu(world: World, device: torch.device | None) -> torch.device:
    """Make the GPU of this rank current: that of ``device``, the current one, or that of its number on this machine."""
    index = None if device is None else device.index
    if index is None:
        index = torch.cuda.current_device() or world.local_rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _other_on(device: torch.device, rank: int, store: dist.Store) -> Difference | None:
    """Note that the rank has its tensors on this GPU; what is wrong if another rank has too."""
    gpu = f"gpu/{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"
    if store.add(gpu, 1) == 1:
        return None
    todo = 'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before you move the model to "cuda"'
    return "device", f"rank {rank} has its tensors on {device}, the GPU of another rank", todo


# -- what ranks compare at the store -----------------------------------------------------------------------------------


def meet_alike(world: World, facts: Mapping[str, object] | None) -> dist.Store:
    """Connect to the store of the ranks and check that all have the same ``facts``; returns the store.

    Raises:
        PeerError: rank 0, which hosts the store, did not start it; or another rank did not come.
        UserError: the port is in use, or a rank has other facts.
    """
    try:
        store = meet(world, RENDEZVOUS_S)
    except dist.DistError as error:
        if world.rank == 0 and "in use" in str(error):
            what = f"{world.master_port}, the port of the rendezvous, is in use on this machine"
            raise UserError("port", what, "give another one, as --port or MASTER_PORT") from None
        if world.rank == 0:
            raise
        where = f"{world.master_addr}:{world.master_port}"
        raise PeerError(f"rank 0 did not join the rendezvous at {where} within {RENDEZVOUS_S:g} s") from error
    store.set_timeout(timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    if facts is not None and world.world_size > 1:
        agree_at(dist.PrefixStore("agree", store), world.rank, world.world_size, facts)
    return store


def agree_at(
    store: dist.Store,
    rank: int,
    world_size: int,
    facts: Mapping[str, object],
    differs: Difference | None = None,
    patience_s: float = RENDEZVOUS_S,
) -> None:
    """Check that every rank has the same ``facts`` as rank 0, through a store, before there is a communicator.

    Every rank calls it once. Each rank reads only rank 0's facts, so that the store can serve thousands of ranks.
    ``differs``: what is wrong on this rank, if that is known already.

    Raises:
        UserError: a rank has other facts; its field is the first fact that differs. The same on every rank.
        PeerError: some ranks have not connected, and none has for ``patience_s``; every rank names the missing ones.
    """
    own = as_json(facts)
    if rank == 0:
        store.set("facts", own)
    if not _came(store, "facts", patience_s):
        raise PeerError(_missing([0], world_size, patience_s))
    differs = differs or first_difference(store.get("facts").decode(), own, rank)
    store.set(f"differs/{rank}", json.dumps(differs))
    if rank == 0:
        everyone = range(world_size)
        is_here = all(_came(store, f"differs/{other}", patience_s) for other in everyone)
        missing = [] if is_here else [other for other in everyone if not store.check([f"differs/{other}"])]
        differences = (json.loads(store.get(f"differs/{other}")) for other in (everyone if is_here else ()))
        store.set("verdict", json.dumps([missing, next(filter(None, differences), None)]))
    if not _came(store, "verdict", patience_s + COLLECTIVE_TIMEOUT_S):
        raise PeerError(_missing([0], world_size, patience_s))
    missing, found = json.loads(store.get("verdict"))
    store.add("heard", 1)
    if not missing and found is None:
        return
    deadline, num_here = time.monotonic() + HEARING_S, world_size - len(missing)
    while rank == 0 and store.add("heard", 0) < num_here and time.monotonic() < deadline:
        time.sleep(0.01)  # rank 0 may host the store, so let the others read the verdict before it ends
    if missing:
        raise PeerError(_missing(missing, world_size, patience_s))
    raise UserError(*found)


def _came(store: dist.Store, key: str, limit_s: float) -> bool:
    """Wait for a key of the store; returns whether it was set within ``limit_s`` from now."""
    deadline, pause_s = time.monotonic() + limit_s, 0.001
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)
    return True


def _missing(ranks: Sequence[int], world_size: int, patience_s: float) -> str:
    named = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {named} of {world_size} did not join the rendezvous, and none has for {patience_s:g} s"


def first_difference(first: str, other: str, rank: int) -> Difference | None:
    """Compare ``rank``'s facts with rank 0's; returns the first that differs, None if they are equal.

    ``first``, ``other``: facts of rank 0 and of ``rank``, by `as_json`.
    """
    theirs, ours = json.loads(first), json.loads(other)
    for field in {**theirs, **ours}:
        if theirs.get(field, "nothing") != ours.get(field, "nothing"):
            has = [repr(facts.get(field, "nothing")) for facts in (ours, theirs)]
            kind = next((kind for kind in _KINDS if field.startswith(kind)), "settings")
            return field, f"rank {rank} has {has[0]}, rank 0 has {has[1]}", f"start every rank with the same {kind}"
    return None


def as_json(facts: Mapping[str, object]) -> str:
    """Return facts as text."""
    return json.dumps(facts, default=str)
