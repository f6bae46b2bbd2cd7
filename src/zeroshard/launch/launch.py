"""Where this process stands among the ranks, how it joins and leaves them, how ranks are started.

The only reader of the environment in the package; `zeroshard.process` sets what others read. Worlds are recognised as
torchrun and torch's elastic agent announce them (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), else as srun
does (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS). `launch_workers` drives torch's elastic agent from Python, because
torchrun turns every failure into exit status 1, and the root cause's own status is what a script needs to know.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import IO, TYPE_CHECKING

from zeroshard.errors import ExitStatus, UserError
from zeroshard.launch.ending import Ending
from zeroshard.launch.machines import Meeting
from zeroshard.process import num_cpus

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SHUTDOWN_GRACE_S = 30  # from SIGTERM to SIGKILL: long enough to save a checkpoint
COLLECTIVE_TIMEOUT_S = 600.0
_LOOPBACK = "127.0.0.1"
_LAUNCHER = "ZEROSHARD_LAUNCHER_PID"  # set for the workers of `launch_workers`
_RESTARTS = "ZEROSHARD_NUM_RESTARTS"  # set there too, after the first
_NODES = "ZEROSHARD_NODES"  # theirs too, where they are put in network namespaces


@dataclass(frozen=True, slots=True)
class World:
    """One process among `world_size`; ``world_size == 1`` needs no address."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class Nodes:
    """Network namespaces of this machine that stand for nodes.

    Attributes:
        names: of the namespaces, by node, as ``ip netns`` lists them.
        interface: what each of them has, and its ranks talk through.
        address: at which this process is reached from all of them.
        node_size: neighbouring ranks in each.
    """

    names: tuple[str, ...]
    interface: str
    address: str
    node_size: int


def world_from_env(env: Mapping[str, str] | None = None) -> World | None:
    """The world that a launcher has put this process in; None where nobody did.

    Args:
        env: variables to read; the process's own where None.

    Raises:
        UserError: a variable that is half there, is no number, or contradicts another.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        addr, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "0")
    elif env.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        addr = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_JOB_NODELIST", ""))
        # every rank must choose alike, and two jobs on one machine differently
        port = env.get("MASTER_PORT") or str(20_000 + _number(env, "SLURM_JOB_ID", "0") % 40_000)
    else:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[2])
    # where nobody says otherwise, one machine holds all ranks
    local_rank = _number(env, names[1], str(rank))
    if not 0 <= rank < world_size:
        raise UserError(names[0], f"{rank} is outside a world of {world_size}", f"set it below {names[2]}")
    if world_size > 1 and not addr:
        raise UserError("MASTER_ADDR", "is not set", "start with `zeroshard train --nproc N`, torchrun or srun")
    return World(rank, local_rank, world_size, addr, _number({"MASTER_PORT": port}, "MASTER_PORT"))


def variable(name: str) -> str:
    """The value of an environment variable; empty where it is not set."""
    return os.environ.get(name, "")


def child_environment(world: World | None) -> dict[str, str]:
    """The environment for a rank that this process starts, and that ends with it.

    Args:
        world: where the rank is to stand; None: where this process does.
    """
    env = os.environ | {_LAUNCHER: str(os.getpid())}
    if world is None or world.world_size == 1:
        return env
    return env | {
        "RANK": str(world.rank),
        "LOCAL_RANK": str(world.local_rank),
        "WORLD_SIZE": str(world.world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def preempt_with(number: signal.Signals) -> None:
    """Have submitit ask for, and jobs that it starts answer, that signal. Call it before submitit is imported."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = number.name.removeprefix("SIG")


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
    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = world.rank == 0 and not agent_has_it
    address = world.master_addr, world.master_port
    store = open_store(*address, serves=serves, timeout_s=timeout_s, world_size=world.world_size)
    # the store may have served an earlier attempt; ranks of our own launcher have a new one each time
    attempt = 0 if _LAUNCHER in os.environ else num_restarts()
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


def enter_node(local_rank: int) -> None:
    """Bring this process into its node's network namespace, for good; call it before anything is connected.

    Threads that are there already stay outside.

    Raises:
        UserError: no launcher of ours has made namespaces.
    """
    if _NODES not in os.environ:
        what = "netns is set up by the launcher, and another one has started this rank"
        raise UserError("link.mode", what, "start the ranks with --nproc")
    nodes = Nodes(**json.loads(os.environ[_NODES]))
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with open(f"/run/netns/{nodes.names[local_rank // nodes.node_size]}", "rb") as namespace:
        if libc.setns(namespace.fileno(), clone_newnet):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")
    use_interface(nodes.interface)


def use_interface(name: str) -> None:
    """Have gloo talk through a network interface of this host.

    Raises:
        UserError: there is none of this name.
    """
    known = [interface for _, interface in socket.if_nameindex()]
    if name not in known:
        raise UserError("link.device", f"there is no interface {name!r}", f"choose one of {', '.join(known)}")
    os.environ["GLOO_SOCKET_IFNAME"] = name


def num_restarts() -> int:
    """How often an elastic agent has started this rank's world anew; 0 without one.

    A machine that came later has seen fewer of them than the others.
    """
    return int(os.environ.get(_RESTARTS, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def count_restart() -> None:
    """In a launcher: the ranks that it starts from now on are a world started anew, for whatever reason.

    torch's agent counts those after a failure alone, not those after a machine has come or gone.
    """
    os.environ[_RESTARTS] = str(int(os.environ.get(_RESTARTS, "0")) + 1)


def shutdown() -> None:
    """Leave the default group, if there is one.

    gloo's worker threads abort the process at exit if anything still holds their work: collecting before and
    after is what keeps the exit clean.
    """
    import torch.distributed as dist

    gc.collect()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def launch_workers(
    argv: Sequence[str],
    nproc: int,
    port: int = 0,
    max_restarts: int = 0,
    max_moves: int = 0,
    meeting: Meeting | None = None,
    nodes: Nodes | None = None,
    imports: Sequence[str] = (),
) -> Ending:
    """Run ``python -m zeroshard ARGV`` as `nproc` ranks on this machine and wait for them all.

    A signal to this process ends them. Call it from the main thread.

    Args:
        argv: the words after ``zeroshard``.
        nproc: ranks to start on this machine, 1 or more.
        port: where they meet on the loopback interface; 0: any free one.
        max_restarts: how often they are started again after one was lost; see `zeroshard.launch.elastic`.
        max_moves: how often beside that, after one has ended as `ExitStatus.MOVED_UP`.
        meeting: where they meet those of other machines; then ``port`` plays no part.
        nodes: where the ranks enter by `enter_node`; None: they stay here.
        imports: modules that every rank will import. Where ranks are forked they are imported here, once.

    Raises:
        UserError: the port is in use.
    """
    if nodes is not None:
        os.environ[_NODES] = json.dumps(asdict(nodes))
    if meeting is None:
        address = nodes.address if nodes else _LOOPBACK
        require_free_port(port, address)
        meeting = Meeting(address, port, own_address=address)
    if nodes is None and meeting.interface:  # of one machine: the loopback interface, which no other reaches
        os.environ.setdefault("GLOO_SOCKET_IFNAME", meeting.interface)
    hang_up = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"  # nohup has it ignored
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"SIGTERM,SIGINT,SIGQUIT,SIGUSR1{hang_up}"
    if meeting.max_nodes > 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # [Note: A store of the ranks' own] in `elastic`
    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus() // nproc)))  # before torch, which reads it then
    from zeroshard.launch.elastic import run_elastic
    from zeroshard.launch.forked import import_all

    if meeting.max_nodes == 1:
        import_all(imports)

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)  # their banner says less than our one line
    return run_elastic(
        argv,
        nproc,
        meeting,
        max_restarts=max_restarts,
        max_moves=max_moves,
        grace_s=SHUTDOWN_GRACE_S,
        run_id=f"zeroshard-{os.getpid()}" if meeting.max_nodes == 1 else "zeroshard",
    )


def start_child(words: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ``zeroshard WORDS``, or another program that calls `end_with_starter`, so that it does not outlive us.

    Call it from the main thread, whose end the kernel waits for.
    """
    env = {**os.environ, _LAUNCHER: str(os.getpid())}
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)


def end_with_starter() -> None:
    """In a process that `start_child` or `launch_workers` has started: die with who did, by the kernel's hand."""
    starter = os.environ.get(_LAUNCHER)
    if starter and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(starter):  # it died before the line above
            os._exit(ExitStatus.PEER_LOST)


def require_free_port(port: int, address: str = _LOOPBACK) -> None:
    """Raise UserError if something listens on `port` of `address`; 0 is always free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one just closed is free
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UserError(
                "port", f"{port} cannot be used ({error.strerror})", "choose another, or 0 for any free one"
            ) from None


def tell_launcher(line: str) -> bool:
    """Leave `line` for `launch_workers` to print once; False where it did not start this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if _LAUNCHER not in os.environ or not path:
        return False
    with open(path, "w", encoding="utf-8") as file:
        json.dump({"message": line, "timestamp": int(time.time())}, file)
    return True


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not re.fullmatch(r"\d+", text):
        what = f"{text!r} is not a number" if name in env else "is not set"
        raise UserError(name, what, "start with `zeroshard train --nproc N`, torchrun or srun")
    return int(text)


def _first_host(nodelist: str) -> str:
    """The first host of SLURM's ``node[03-04,07],other`` notation: ``node03``."""
    match = re.match(r"([^,\[]*)(?:\[(\d+))?", nodelist)
    return "" if match is None else match[1] + (match[2] or "")
