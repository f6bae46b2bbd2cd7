"""A TCP store that listens at one address.

torch's `TCPStore` listens on all interfaces of its machine and asks nobody who they are: whoever reaches the port reads
and writes what ranks leave for each other, the secrets of the ring's connections included. So its socket is made here,
bound to the address at which ranks are told to meet: ranks of one machine meet on the loopback interface, which no
other machine reaches, those of several on the network that leads to all of them.

A name that leads to a loopback address on its own machine, as distributions have it in ``/etc/hosts``, says nothing of
where others look for it. Only then does the store listen everywhere, and says so.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 2048  # connections of ranks that all come at once


def open_store(host: str, port: int, *, serves: bool, timeout_s: float, world_size: int | None = None) -> dist.TCPStore:
    """The store at ``host:port``.

    Args:
        host: a name or address; with ``serves`` one of this machine.
        port: of the store; 0 with ``serves``: any free one.
        serves: whether it lives in this process; else it is another's, which is waited for.
        timeout_s: how long whoever asks the store for something waits for it.
        world_size: how many processes will come; None: nobody knows.

    Raises:
        OSError: the port is taken, or the name leads nowhere.
        RuntimeError: nobody answers there (`torch.distributed.DistNetworkError`, `DistStoreError`).
    """
    timeout = timedelta(seconds=timeout_s)
    if not serves:
        return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    server = _listen(host, port)
    try:
        return dist.TCPStore(
            host,
            server.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=server.detach(),  # the store closes it
        )
    finally:
        server.close()


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    leads_elsewhere = ipaddress.ip_address(address).is_loopback and not _is_loopback_itself(host)
    if not leads_elsewhere:
        try:
            return _bound(family, str(address), port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    why = f"leads to {address} here" if leads_elsewhere else f"is {address}, which no interface here has"
    line = f"warning: the store at which ranks meet listens on all interfaces, because {host} {why}"
    print(f"{line}; name an address of this machine instead", file=sys.stderr, flush=True)
    return _bound(family, "::" if family == socket.AF_INET6 else "", port)


def _is_loopback_itself(host: str) -> bool:
    """Whether ``host`` means the loopback interface on every machine, and not just here."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one just closed is free
        server.bind((address, port))
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server
