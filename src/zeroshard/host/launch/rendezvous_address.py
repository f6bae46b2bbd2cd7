"""Several machines in one world: how many may take part, where they meet, and the address of this one.

Each machine runs the same command with the same ``HOST:PORT``. The machine that has the address HOST serves the
rendezvous there; the others connect. torch's c10d rendezvous guesses by host names which machine that is, and over
which interface gloo communicates. It guesses wrong if names resolve to loopback, or if a machine has several networks.
We ask the kernel instead: an address is this machine's if a socket can be bound to it, and this machine's own address
is the source address of the route to HOST.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from zeroshard.host.errors import UserError

DEFAULT_PORT = 29400  # torchrun's
PROBE_S = 5.0  # between two attempts to connect to the rendezvous, and the timeout of each
UNREACHABLE_AFTER_S = 30.0  # after so long without a connection the rendezvous counts as unreachable


@dataclass(frozen=True, slots=True)
class RendezvousAddress:
    """Where the machines of a world meet."""

    host: str = "127.0.0.1"  # name or address of the machine that serves the rendezvous
    port: int = 0  # the port there
    min_nodes: int = 1  # the least number of machines with which a world is started
    max_nodes: int = 1  # the most machines in a world; further ones may come and wait
    own_address: str = "127.0.0.1"  # address of this machine, on the network that leads to ``host``
    serves: bool = True  # whether this process should serve the rendezvous

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``."""
        return f"{self.host}:{self.port}"

    @property
    def interface(self) -> str:
        """The network interface that has ``own_address``; empty if none is found."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == self.own_address for each in addresses):
                return name
        return ""


def rendezvous_at(endpoint: str, min_nodes: int, max_nodes: int) -> RendezvousAddress:
    """Return the rendezvous at ``endpoint``, which is ``HOST`` or ``HOST:PORT``, with this machine's own address.

    Raises:
        UserError: ``endpoint`` is neither, or HOST cannot be resolved or reached.
    """
    host, colon, digits = endpoint.rpartition(":") if ":" in endpoint else (endpoint, "", str(DEFAULT_PORT))
    if not host or not digits.isdecimal() or not 0 < int(digits) < 65536:
        raise UserError("rdzv_endpoint", f"{endpoint!r} is no HOST:PORT", f"give it as node0{colon or ':'}29400")
    port = int(digits)
    try:
        address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]
        own = _address_towards(str(address), port)
    except OSError as error:
        what = f"{host} cannot be reached ({error.strerror or error})"
        raise UserError("rdzv_endpoint", what, "give the name or address of one of the machines") from None
    return RendezvousAddress(host, port, min_nodes, max_nodes, own, serves=_can_serve(str(address), port))


def watch(rendezvous: RendezvousAddress, ended: threading.Event, on_unreachable: Callable[[], None]) -> None:
    """Call ``on_unreachable`` if nothing answers at the rendezvous for `UNREACHABLE_AFTER_S`; return once ``ended``.

    If a link is down, torch's client of the rendezvous store blocks until TCP gives up, a quarter of an hour later. So
    a separate thread runs this function, which tests whether a connection can still be made.
    """
    answered = time.monotonic()
    while not ended.wait(PROBE_S):
        try:
            socket.create_connection((rendezvous.host, rendezvous.port), PROBE_S).close()
            answered = time.monotonic()
        except OSError:
            if time.monotonic() - answered > UNREACHABLE_AFTER_S:
                on_unreachable()
                return


def _address_towards(address: str, port: int) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((address, port))  # a datagram socket: nothing is sent
        return str(route.getsockname()[0])


def _can_serve(address: str, port: int) -> bool:
    """Return whether the address is this machine's and nothing listens on the port yet."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
