"""Several machines in one world: how many may take part, where they meet, and as whom this one comes.

Each machine runs the same command with the same ``HOST:PORT``. Whoever has the address HOST serves the meeting there,
through torch's c10d rendezvous; the others come. torch guesses by host names which of them that is and over which
interface gloo talks, and guesses wrong where names resolve to loopback or a machine has several networks. Here the
kernel is asked: an address is ours if a socket can be bound to it, and our own address is that of a route to it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

from zeroshard.errors import UserError

DEFAULT_PORT = 29400  # torchrun's
PROBE_S = 5.0  # between two looks at the meeting, and for each of them
UNREACHABLE_AFTER_S = 30.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the machines of a world meet.

    Attributes:
        host, port: of whoever serves the meeting.
        min_nodes: machines without which a world is not started.
        max_nodes: machines that it takes at most; more may come and wait.
        own_address: of this machine, on the network that leads to ``host``.
        serves: whether this process is to serve the meeting.
    """

    host: str = "127.0.0.1"
    port: int = 0
    min_nodes: int = 1
    max_nodes: int = 1
    own_address: str = "127.0.0.1"
    serves: bool = True

    @property
    def endpoint(self) -> str:
        """``HOST:PORT``."""
        return f"{self.host}:{self.port}"

    @property
    def interface(self) -> str:
        """The network interface that has ``own_address``; empty where none is found."""
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address == self.own_address for each in addresses):
                return name
        return ""


def meeting_at(endpoint: str, min_nodes: int, max_nodes: int) -> Meeting:
    """This machine's view of the meeting at ``endpoint``, which is ``HOST`` or ``HOST:PORT``.

    Raises:
        UserError: ``endpoint`` is neither, or HOST cannot be found.
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
    return Meeting(host, port, min_nodes, max_nodes, own, serves=_can_serve(str(address), port))


def watch(meeting: Meeting, ended: threading.Event, on_unreachable: Callable[[], None]) -> None:
    """Call ``on_unreachable`` once nothing has answered at the meeting for `UNREACHABLE_AFTER_S`, unless ``ended``.

    Where a link is down nothing fails: torch's client of the meeting's store waits for an answer until TCP gives up, a
    quarter of an hour later, and holds whoever asked. So another thread looks whether a connection can still be made.
    """
    answered = time.monotonic()
    while not ended.wait(PROBE_S):
        try:
            socket.create_connection((meeting.host, meeting.port), PROBE_S).close()
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
    """Whether the address is this machine's and nobody serves there yet."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
