"""Slow networks made by this machine's kernel: network namespaces that act as nodes.

    namespace zsnet0-0            this host                namespace zsnet0-1
    ranks -- net0 ====== zsnet0v0 -- zsnet0br -- zsnet0v1 ====== net0 -- ranks

Each node has a veth pair to one bridge, and both of its ends are shaped, so that a node sends and receives at the rate
asked for at the same time: ``net0`` shapes the traffic that leaves the node, ``zsnet0v0`` the traffic that enters it.
Ranks of one node communicate through its loopback interface, which is not shaped. The bridge has an address too, where
the launcher's store listens.

The shaper is ``tbf``, a token bucket filter. Its burst must cover the bytes that pass between two of the kernel's timer
ticks, or the rate is not reached (`shaper_burst`). Frames are jumbo frames: with 1,500 bytes, headers would take 4 % of
the rate.

[Note: Who decides how fast to send]
    Nodes use TCP Reno, which sends faster until packets are lost. The queue before the bucket is longer than all that
    TCP may have in flight, so none are lost, and the bucket alone sets the rate. A host may use BBR, which estimates
    the bandwidth instead: it takes a bucket's bursts for the bandwidth and regularly slows down to measure again, and
    so reaches only 80 to 98 of 100 Mbit/s.

[Note: Nothing is left behind]
    A network has a number, and the process that made it holds a lock file of that number. The kernel releases the lock
    however the process ends. So a number whose lock is free has no owner, and namespaces and links with that number in
    their names are removed by the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

from zeroshard.host.errors import UserError
from zeroshard.host.launch.environment import NetnsNodes
from zeroshard.host.regular_files import open_regular

LOCKS = Path("/run/zeroshard")
MAX_NETWORKS, MAX_NODES = 250, 250  # each is an octet of an address
MTU = 9000
INTERFACE = "net0"
HANDLE, INNER_HANDLE = "7a73:", "7a74:"  # "zs", "zt": they mark the queues that we made
_QUEUE_BYTES, _QUEUE_S = 64 << 20, 0.1  # length of the queue before the bucket: no packet should be dropped
_PACE = "reno"  # [Note: Who decides how fast to send]; every kernel has it, and allows it in every namespace
_PACE_FILE = "/proc/sys/net/ipv4/tcp_congestion_control"  # applies to the namespace that opens it
_MIN_BURST_BYTES = 64 << 10
_TICK_S = 4e-3


def shaper_burst(bytes_per_s: float) -> int:
    """The smallest burst in bytes that reached the rate within 2 % in measurements (100 Mbit/s to 10 Gbit/s)."""
    return max(_MIN_BURST_BYTES, round(bytes_per_s * _TICK_S))


def shaping(bytes_per_s: float, latency_s: float = 0.0, burst_bytes: int = 0) -> list[list[str]]:
    """The arguments after ``tc qdisc add dev DEV`` for each queue, outermost first.

    Args:
        bytes_per_s: rate at which the interface sends. tc takes it in bits, as ``bit``.
        latency_s: delay of each packet before it reaches the bucket; 0: none.
        burst_bytes: bytes that pass at once after a pause; 0: `shaper_burst`. tc writes ``b`` for bytes.
    """
    bucket = [
        *("tbf", "rate", f"{round(bytes_per_s * 8)}bit"),
        *("burst", f"{burst_bytes or shaper_burst(bytes_per_s)}b"),
        *("limit", f"{max(_QUEUE_BYTES, round(bytes_per_s * _QUEUE_S))}b"),
    ]
    if not latency_s:
        return [["root", "handle", HANDLE, *bucket]]
    num_packets = 1000 + round(2 * bytes_per_s * latency_s / 1500)  # in flight
    delay = ["netem", "delay", f"{round(latency_s * 1e6)}us", "limit", str(num_packets)]
    return [["root", "handle", HANDLE, *delay], ["parent", f"{HANDLE}1", "handle", INNER_HANDLE, *bucket]]


# -- namespaces ---------------------------------------------------------------------------------------------------


@contextmanager
def nodes(
    num_nodes: int, node_size: int, bytes_per_s: float, latency_s: float = 0.0, burst_bytes: int = 0
) -> Generator[NetnsNodes]:
    """Make nodes as shaped network namespaces, which exist while the block runs; first removes leftover networks.

    Args:
        num_nodes: number of nodes, at least 2.
        bytes_per_s, latency_s, burst_bytes: properties of a node's link, as in `shaping`.

    Raises:
        UserError: the process is not root, a tool is missing, or the kernel does not support it.
    """
    require_root("link.mode", "netns makes network namespaces")
    if not 2 <= num_nodes <= MAX_NODES:
        raise UserError("nproc", f"{num_nodes} nodes", f"use 2 to {MAX_NODES}")
    clean()
    number, lock = _claim()
    try:
        with _signals_wait():
            _make(number, num_nodes, shaping(bytes_per_s, latency_s, burst_bytes), shaping(bytes_per_s, 0, burst_bytes))
        names = tuple(f"zsnet{number}-{node}" for node in range(num_nodes))
        yield NetnsNodes(names, INTERFACE, _address(number, MAX_NODES), node_size)
    finally:
        with _signals_wait():
            _remove(number)
            os.close(lock)


def clean() -> list[str]:
    """Remove networks whose processes have ended, and return the names of the removed namespaces and links.

    Raises:
        UserError: the process is not root, or a tool is missing.
    """
    require_root("link.mode", "netns removes network namespaces")
    found = []
    numbers = (_number_of(name) for name in _leftovers())
    for number in sorted({number for number in numbers if number is not None}):
        lock = _lock(number)
        if lock is not None:
            found += _remove(number)
            os.close(lock)
    return found


def _make(number: int, num_nodes: int, out: list[list[str]], back: list[list[str]]) -> None:
    bridge = f"zsnet{number}br"
    _run("ip", "link", "add", bridge, "mtu", str(MTU), "type", "bridge")
    _run("ip", "addr", "add", f"{_address(number, MAX_NODES)}/24", "dev", bridge)
    _run("ip", "link", "set", bridge, "up")
    for node in range(num_nodes):
        name, outer = f"zsnet{number}-{node}", f"zsnet{number}v{node}"
        _run("ip", "netns", "add", name)
        pair = ("type", "veth", "peer", "name", INTERFACE, "mtu", str(MTU), "netns", name)
        _run("ip", "link", "add", outer, "mtu", str(MTU), *pair)
        _run("ip", "link", "set", outer, "master", bridge, "up")
        inside = ("ip", "-n", name)
        _run(*inside, "link", "set", INTERFACE, "addrgenmode", "none")  # so that gloo finds only the address below
        _run(*inside, "addr", "add", f"{_address(number, node)}/24", "dev", INTERFACE)
        _run(*inside, "link", "set", "lo", "up")
        _run(*inside, "link", "set", INTERFACE, "up")
        _run("ip", "netns", "exec", name, "sh", "-c", f"echo {_PACE} > {_PACE_FILE}")
        for words in out:
            _add_queue(("tc", "-n", name), INTERFACE, words)
        for words in back:
            _add_queue(("tc",), outer, words)


def _remove(number: int) -> list[str]:
    """Remove the namespaces and links of network ``number``, and return their names."""
    names = [name for name in _leftovers() if _number_of(name) == number]
    for name in sorted(names, key=lambda name: "-" in name):  # namespaces last
        kind = ("netns", "delete") if "-" in name else ("link", "delete")
        _run("ip", *kind, name, missing_ok=True)
    if left := [name for name in _leftovers() if _number_of(name) == number]:
        raise UserError("network", f"{', '.join(left)} cannot be removed", "end what uses it")
    return names


def _leftovers() -> Iterator[str]:
    """Names of the namespaces and links on this machine that belong to one of our networks."""
    for kind in (("netns", "list"), ("link", "show")):
        for entry in json.loads(_run("ip", "-j", *kind) or "[]"):
            name = entry.get("ifname") or entry.get("name", "")
            if _number_of(name) is not None:
                yield name


def _number_of(name: str) -> int | None:
    """The network's number in a name: 3 for ``zsnet3-0``, ``zsnet3br``, ``zsnet3v0``; None if the name is not ours."""
    match = re.fullmatch(r"zsnet(\d+)(?:-\d+|br|v\d+)", name)
    return None if match is None else int(match[1])


def _address(number: int, node: int) -> str:
    return f"10.213.{number}.{node + 1}"


def _claim() -> tuple[int, int]:
    """Lock a free network number and remove its leftovers; returns the number and the lock's file descriptor."""
    for number in range(MAX_NETWORKS):
        lock = _lock(number)
        if lock is not None:
            _remove(number)
            return number, lock
    raise UserError("link.mode", f"{MAX_NETWORKS} networks are in use here", "end some of them")


def _lock(number: int) -> int | None:
    """Lock a network number: [Note: Nothing is left behind].

    Returns the lock's file descriptor, or None if another process holds it.
    """
    LOCKS.mkdir(parents=True, exist_ok=True)
    descriptor = open_regular(LOCKS / f"network-{number}", os.O_RDWR | os.O_CREAT, 0o600, follow=False)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


@contextmanager
def _signals_wait() -> Generator[None]:
    """Defer signals that would end this process, so that a network is never left half made or half removed."""
    if threading.current_thread() is not threading.main_thread():  # Python runs signal handlers in the main thread only
        yield
        return
    came: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {signum: signal.signal(signum, lambda number, frame: came.append(number)) for signum in ending}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
        for signum in came:
            signal.raise_signal(signum)


# -- tools --------------------------------------------------------------------------------------------------------


def require_root(field: str, why: str) -> None:
    """Raise UserError if this process is not root, or if the tools ``ip`` and ``tc`` are not installed."""
    if os.geteuid() != 0:
        raise UserError(field, f"{why}, which only root may", "run it as root, or use --link.mode simulated")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UserError(field, f"{why} with {tool}, which is not installed", "install iproute2")


def _add_queue(tc: tuple[str, ...], device: str, words: list[str]) -> None:
    try:
        _run(*tc, "qdisc", "add", "dev", device, *words)
    except UserError as error:
        if "kind is unknown" in error.what and "netem" in words:
            what = "this kernel has no netem, and can delay no packet"
            raise UserError("link.latency", what, "leave it out, or use --link.mode simulated") from None
        raise


def _run(*words: str, missing_ok: bool = False) -> str:
    """Run a command and return its output; ``missing_ok``: a failure is ignored, as when the object is gone already."""
    # in a session of its own, so that Ctrl-C does not end it half way
    done = subprocess.run(words, capture_output=True, text=True, check=False, start_new_session=True)
    if done.returncode and not missing_ok:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise UserError("network", f"`{' '.join(words)}` failed: {said}", "see what this kernel and container allow")
    return done.stdout
