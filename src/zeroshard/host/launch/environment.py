"""Environment variables: this process's rank and world, and what it passes on to the processes that it starts.

Other modules read variables through this one, except `zeroshard.host.process`, which sets those that libraries read.

[Note: Who has started this process]
    A world is recognised by the variables of torchrun, Open MPI, MPICH, Intel MPI or srun, in this order: under SLURM
    ``mpirun`` starts its own helpers by srun, whose variables its ranks inherit. SLURM sets SLURM_PROCID and
    SLURM_NTASKS also where it has started one process only, in the script of ``sbatch`` and in the shell of ``salloc``.
    There SLURM_STEP_ID is missing or a special number; srun counts its steps from 0.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from zeroshard.host.errors import ExitStatus, UserError
from zeroshard.host.process import num_cpus

_LAUNCHER = "ZEROSHARD_LAUNCHER_PID"  # set for the ranks of `launch_workers`
_RESTARTS = "ZEROSHARD_NUM_RESTARTS"  # set for them too, once they have been restarted
_NODES = "ZEROSHARD_NODES"  # set for them too, if they are to enter network namespaces
_IS_RANK = "ZEROSHARD_IS_RANK"  # set by a rank for the processes that it starts: see `claim_rank`
_LAUNCH = "start with `zeroshard train --nproc N`, torchrun or srun"

# What launchers call a process's rank, its rank on its machine, and the number of processes.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")
_MPICH = ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE")  # Intel MPI too
_SRUN = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS")
_NO_STEP = 0xFFFF_FFF0  # from here on SLURM_STEP_ID is that of a batch script or an interactive shell


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
    names = _names_of_launcher(env)
    if names is None:
        return None
    rank, world_size = _number(env, names[0]), _number(env, names[2])
    # without a local rank we assume that all ranks are on one machine
    local_rank = _number(env, names[1], str(rank))
    if not 0 <= rank < world_size:
        raise UserError(names[0], f"{rank} is outside a world of {world_size}", f"set it below {names[2]}")
    if world_size == 1:
        return World(local_rank=local_rank)
    addr, port = _address(env, names)
    if not addr:
        raise UserError("MASTER_ADDR", "is not set", _LAUNCH)
    return World(rank, local_rank, world_size, addr, _number({"MASTER_PORT": port} if port else {}, "MASTER_PORT"))


def num_tasks_without_srun() -> int:
    """How many tasks SLURM has for the job whose script, or shell, has started this process without srun; else 0."""
    num_tasks = os.environ.get("SLURM_NTASKS", "")
    return int(num_tasks) if num_tasks.isdecimal() and not _in_step(os.environ) else 0


def claim_rank(world: World) -> int:
    """Note, for processes that this one starts, that it is this rank of ``world``.

    Returns:
        The id of the process that is this rank already: it has started this one, which has its variables; else 0.
    """
    pid, _, claimed = os.environ.get(_IS_RANK, "").partition(" ")
    if claimed == str(world) and pid != str(os.getpid()):
        return int(pid)
    os.environ[_IS_RANK] = f"{os.getpid()} {world}"
    return 0


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
    if nproc > 1:  # one rank has as many threads as without a launcher
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


def _names_of_launcher(env: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the names of the variables that say this process's rank: [Note: Who has started this process]."""
    if "RANK" in env:
        return _TORCHRUN
    for names in (_OPEN_MPI, _MPICH, _SRUN):
        there = names[0] in env and (_in_step(env) if names is _SRUN else names[1] in env)
        size = env.get(names[2], "1")
        if there and size != "1" and env.get("WORLD_SIZE", size) == size:
            return names
    return _TORCHRUN if env.get("WORLD_SIZE", "1") != "1" else None


def _in_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return step.isdecimal() and int(step) < _NO_STEP


def _address(env: Mapping[str, str], names: tuple[str, str, str]) -> tuple[str, str]:
    """Return address and port of the rendezvous; empty where they are unknown. Every rank finds the same."""
    addr, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    if names is _SRUN:
        # two jobs on one machine choose different ports
        own_port = 20_000 + _number(env, "SLURM_JOB_ID", "0") % 40_000
        return addr or _first_host(env.get("SLURM_JOB_NODELIST", "")), port or str(own_port)
    if names is _OPEN_MPI:
        on_one_machine = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == env[names[2]]
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
        own_port = str(20_000 + zlib.crc32(job.encode()) % 40_000) if job else ""
        return addr or ("127.0.0.1" if on_one_machine else ""), port or own_port
    return addr, port


def _number(env: Mapping[str, str], name: str, default: str = "") -> int:
    text = env.get(name, default)
    if not re.fullmatch(r"\d+", text):
        what = f"{text!r} is not a number" if name in env else "is not set"
        raise UserError(name, what, _LAUNCH)
    return int(text)


def _first_host(nodelist: str) -> str:
    """Return the first host of a node list in SLURM's notation: ``node03`` for ``node[03-04,07],other``."""
    match = re.match(r"([^,\[]*)(?:\[(\d+))?", nodelist)
    return "" if match is None else match[1] + (match[2] or "")
