"""Starts ranks on this machine, and other programs that must not outlive this process.

`launch_workers` drives torch's elastic agent from Python. torchrun turns every failure into exit status 1, whereas
`launch_workers` reports the exit status of the root cause, which scripts need.
"""

from __future__ import annotations

import logging
import socket
import subprocess
from collections.abc import Callable, Sequence
from typing import IO

from zeroshard.host.errors import UserError
from zeroshard.host.launch.ending import Ending
from zeroshard.host.launch.environment import NetnsNodes, child_environment, set_for_workers
from zeroshard.host.launch.rendezvous_address import RendezvousAddress

AfterOomKill = Callable[[int], Ending | None]
_LOOPBACK = "127.0.0.1"


def launch_workers(
    argv: Sequence[str],
    nproc: int,
    port: int = 0,
    max_restarts: int = 0,
    max_levers: int = 0,
    after_oom_kill: AfterOomKill | None = None,
    rendezvous: RendezvousAddress | None = None,
    nodes: NetnsNodes | None = None,
    imports: Sequence[str] = (),
) -> Ending:
    """Run ``python -m zeroshard ARGV`` as `nproc` ranks on this machine and wait for them all.

    A signal to this process ends them. Call it from the main thread.

    Args:
        argv: the words after ``zeroshard``.
        nproc: ranks to start on this machine, 1 or more.
        port: port of their rendezvous on the loopback interface; 0: any free one.
        max_restarts: how often they are started again after one failed or was lost: `zeroshard.host.launch.elastic`.
        max_levers: how often they are also started again after one has ended with `ExitStatus.OUT_OF_MEMORY`.
        after_oom_kill: what the run says if the kernel has killed this rank for lack of memory: `run_elastic`.
        rendezvous: where they meet the ranks of other machines; ``port`` is then ignored.
        nodes: network namespaces that the ranks enter by `enter_node`; None: they stay in this one.
        imports: modules that every rank will import; with one machine they are imported here, once, and ranks are
            forked afterwards.

    Raises:
        UserError: the port is in use.
    """
    alone = rendezvous is None or rendezvous.max_nodes == 1
    if rendezvous is None:
        address = nodes.address if nodes else _LOOPBACK
        require_free_port(port, address)
        rendezvous = RendezvousAddress(address, port, own_address=address)
    # with one machine it is the loopback interface, which other machines cannot reach
    interface = rendezvous.interface if nodes is None else ""
    set_for_workers(nproc, nodes=nodes, interface=interface)
    from zeroshard.host.launch.elastic import run_elastic
    from zeroshard.host.launch.forked import import_all

    if alone:
        import_all(imports)
    _silence_elastic_loggers()
    return run_elastic(
        argv, nproc, rendezvous, max_restarts=max_restarts, max_levers=max_levers, after_oom_kill=after_oom_kill
    )


def _silence_elastic_loggers() -> None:
    """Silence the agent's loggers: their banner says less than our one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)


def start_child(words: Sequence[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start ``zeroshard``, or a program that calls `end_with_starter`, so that it does not outlive this process.

    Call it from the main thread: the kernel kills the child when the thread that started it ends.
    """
    env = child_environment(None)
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env)


def require_free_port(port: int, address: str = _LOOPBACK) -> None:
    """Raise UserError if something listens on `port` of `address`; 0 is always free."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed counts as free
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UserError(
                "port", f"{port} cannot be used ({error.strerror})", "choose another, or 0 for any free one"
            ) from None
