"""Environment variables: this process's rank and world, and what it passes on to the processes that it starts.

Other modules read variables through this one, except `zeroshard.process`, which sets those that libraries read. A world
is recognised by the variables of torchrun and torch's elastic agent (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR,
MASTER_PORT), else by those of srun (SLURM_PROCID, SLURM_LOCALID, SLURM_NTASKS).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from zeroshard.errors import ExitStatus, UserError
from zeroshard.process import num_cpus

_LAUNCHER = "ZEROSHARD_LAUNCHER_PID"  # set for the ranks of `launch_workers`
_RESTARTS = "ZEROSHARD_NUM_RESTARTS"  # set for them too, once they have been restarted
_NODES = "ZEROSHARD_NODES"  # set for them too, if they are to enter network namespaces


@dataclass(frozen=True, slots=True)
class World:
    """This process's place among `world_size` processes; ``world_size == 1`` needs no address."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    master_addr: str = ""
    master_port: int = 0


@dataclass(frozen=True, slots=True)
class NetnsNodes:
    """Network namespaces of this machine that simulate nodes."""

    names: tuple[str, ...]  # names of the namespaces, by node, as ``ip netns`` lists them
    interface: str  # name of the network interface, the same in each of them, through which ranks communicate
    address: str  # address at which this process can be reached from all of them
    node_size: int  # how many neighbouring ranks are in each


def world_from_env(env: Mapping[str, str] | None = None) -> World | None:
    """Return the world that a launcher has put this process in; None if no launcher did.

    Args:
        env: variables to read; None: the process's own.

    Raises:
        UserError: a variable is missing, is no number, or contradicts another.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        addr, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "0")
    elif env.get("SLURM_NTASKS", "1") != "1" and "SLURM_PROCID" in env:
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
        addr = env.get("MASTER_ADDR") or _first_host(env.get("SLURM_JOB_NODELIST", ""))
        # every rank must choose the same port, and two jobs on one machine different ones
        port = env.get("MASTER_PORT") or str(20_000 + _number(env, "SLURM_JOB_ID", "0") % 40_000)
    else:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[2])
    # without a local rank we assume that all ranks are on one machine
    local_rank = _number(env, names[1], str(rank))
    if not 0 <= rank < world_size:
        raise UserError(names[0], f"{rank} is outside a world of {world_size}", f"set it below {names[2]}")
    if world_size > 1 and not addr:
        raise UserError("MASTER_ADDR", "is not set", "start with `zeroshard train --nproc N`, torchrun or srun")
    return World(rank, local_rank, world_size, addr, _number({"MASTER_PORT": port}, "MASTER_PORT"))


def variable(name: str) -> str:
    """Return the value of an environment variable; empty if it is not set."""
    return os.environ.get(name, "")


def child_environment(world: World | None) -> dict[str, str]:
    """Return the environment for a rank that this process starts, and that ends with it by `end_with_starter`.

    Args:
        world: the rank's place in the world; None: this process's own.
    """
    env = {**os.environ, _LAUNCHER: str(os.getpid())}
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
    """Set the signal by which submitit has its jobs preempted, and that they handle. Call it before importing it."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = number.name.removeprefix("SIG")


def num_restarts() -> int:
    """Return how often an elastic agent has restarted this rank's world; 0 without an agent.

    The number is lower on a machine that joined later.
    """
    return int(os.environ.get(_RESTARTS, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))


def count_restart() -> None:
    """In a launcher, increment `num_restarts` of the ranks that it starts from now on, whatever the reason.

    torch's agent counts only restarts after a failure, not those after a machine has come or gone.
    """
    os.environ[_RESTARTS] = str(int(os.environ.get(_RESTARTS, "0")) + 1)


def set_for_workers(nproc: int, *, nodes: NetnsNodes | None, interface: str) -> None:
    """Set the variables that the ranks and torch's agent in this process read. Call it before torch is imported.

    Args:
        nproc: how many ranks this machine has.
        nodes: network namespaces that they enter by `enter_node`; None: they enter none.
        interface: network interface for gloo, unless ``GLOO_SOCKET_IFNAME`` is set; empty: gloo chooses.
    """
    if nodes is not None:
        os.environ[_NODES] = json.dumps(asdict(nodes))
    if interface:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    hang_up = "" if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else ",SIGHUP"  # under nohup it is ignored
    # torch's agent would serve the ranks' store on all interfaces, and name the same one after its machine was lost
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = f"SIGTERM,SIGINT,SIGQUIT,SIGUSR1{hang_up}"
    os.environ[_LAUNCHER] = str(os.getpid())
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cpus() // nproc)))  # before torch, which reads it then


def use_deterministic_cublas() -> None:
    """Configure cuBLAS's workspaces so that its results are deterministic; call it before the first matmul on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def has_launcher() -> bool:
    """Return whether a launcher of ours has started this process."""
    return _LAUNCHER in os.environ


def enter_node(local_rank: int) -> None:
    """Move this process into its node's network namespace, for good; call it before it opens any connection.

    Only the calling thread moves, and threads that it starts later; existing threads stay outside.

    Raises:
        UserError: no launcher of ours has made namespaces.
    """
    if _NODES not in os.environ:
        what = "netns is set up by the launcher, and another one has started this rank"
        raise UserError("link.mode", what, "start the ranks with --nproc")
    nodes = NetnsNodes(**json.loads(os.environ[_NODES]))
    clone_newnet = 0x40000000
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    with open(f"/run/netns/{nodes.names[local_rank // nodes.node_size]}", "rb") as namespace:
        if libc.setns(namespace.fileno(), clone_newnet):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace.name}")
    os.environ["GLOO_SOCKET_IFNAME"] = nodes.interface  # of gloo, and of our ring


def end_with_starter() -> None:
    """In a process that `start_child` or `launch_workers` started: have the kernel kill it when its starter dies."""
    starter = os.environ.get(_LAUNCHER)
    if starter and sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != int(starter):  # the starter died before the line above
            os._exit(ExitStatus.PEER_LOST)


def tell_launcher(line: str) -> bool:
    """Leave `line` for `launch_workers` to print once; return False if `launch_workers` did not start this process."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not has_launcher() or not path:
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
    """Return the first host of a node list in SLURM's notation: ``node03`` for ``node[03-04,07],other``."""
    match = re.match(r"([^,\[]*)(?:\[(\d+))?", nodelist)
    return "" if match is None else match[1] + (match[2] or "")
