"""A `TCPStore` that listens at one address only.

torch's `TCPStore` listens on all interfaces of its machine and has no authentication: any process that reaches the port
can read and write all keys, including the secrets of the ring's connections. So we make its listening socket ourselves,
bound to the address at which ranks are told to meet. Ranks of one machine meet on the loopback interface, which other
machines cannot reach; ranks of several machines meet on the network that connects them.

Distributions often map a machine's own name to a loopback address in ``/etc/hosts``. Such a name does not tell at which
address other machines look for the store. In that case, and if the address belongs to no interface here, the store
listens on all interfaces and prints a warning.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from datetime import timedelta

import torch.distributed as dist

_BACKLOG = 4096  # how many connections can wait, of ranks that connect at once, until the store is served


def open_store(host: str, port: int, *, serves: bool, timeout_s: float, world_size: int | None = None) -> dist.TCPStore:
    """Open the store at ``host:port``: serve it in this process, or connect to another process that does.

    Args:
        host: a name or address; with ``serves`` one of this machine.
        port: port of the store; 0 with ``serves``: any free one.
        serves: whether this process serves the store; if not, wait for the process that does.
        world_size: how many processes will connect; None: unknown.

    Raises:
        OSError: the port is taken, or the name cannot be resolved.
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
            return listening_socket(family, str(address), port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    why = f"resolves to {address} here" if leads_elsewhere else f"is {address}, which no interface here has"
    line = f"warning: the rendezvous store listens on all interfaces, because {host} {why}"
    print(f"{line}; name an address of this machine instead", file=sys.stderr, flush=True)
    return listening_socket(family, "::" if family == socket.AF_INET6 else "", port)


def _is_loopback_itself(host: str) -> bool:
    """Return whether ``host`` means the loopback interface on every machine, and not just here."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listening_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    """A socket that listens at ``address`` alone; port 0: any free one."""
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed counts as free
        server.bind((address, port))
        server.listen(_BACKLOG)
    except BaseException:
        server.close()
        raise
    return server
