"""Communicators by name: what ``--comm`` and the benches may choose.

A new one is a class of `zeroshard.comm.Communicator`'s methods in one file, and one row of `COMMUNICATORS`. Messages,
``--help``, shell completion and the checks of settings read the rows, which needs no torch. ``--comm module:name`` is a
communicator of a user's own, which has no row, and all properties at their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroshard.errors import UserError
from zeroshard.lazily import is_address, made_at

if TYPE_CHECKING:
    from zeroshard.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class CommEntry:
    """A row; calling it makes the communicator over torch.distributed's default group, which is initialised before.

    Attributes:
        factory: ``module:name`` of a class or function that takes no arguments and returns a `Communicator`, or itself.
            Where the communicator has a ``close``, it is called in the end.
        cpu_only: it moves CPU tensors alone.
        over_network: ranks of several hosts can use it, and a network that the kernel slows slows it.
        alone: it is made in a world of one rank too; else that rank gets a `LocalCommunicator`.
    """

    factory: str | Callable[[], Communicator]
    cpu_only: bool = False
    over_network: bool = True
    alone: bool = False

    def __call__(self) -> Communicator:
        """Make the communicator."""
        return made_at(self.factory, "comm", ("rank", "world_size", "all_reduce", "reduce_scatter", "all_gather"))


COMMUNICATORS: dict[str, CommEntry] = {
    "torch": CommEntry("zeroshard.comm.backends.torch_dist:TorchCommunicator", alone=True),
    "ring": CommEntry("zeroshard.comm.ring.ring:RingCommunicator", cpu_only=True),
    "two-level": CommEntry("zeroshard.comm.two_level.two_level:TwoLevelCommunicator", cpu_only=True),
    "shm": CommEntry("zeroshard.comm.shm.shm:SharedMemoryCommunicator", cpu_only=True, over_network=False),
}


def comm_entry(name: str) -> CommEntry:
    """The row of ``name``, or one with all defaults for ``module:name``; imports nothing.

    Raises:
        UserError: there is none of this name.
    """
    if name in COMMUNICATORS:
        return COMMUNICATORS[name]
    if is_address(name):
        return CommEntry(name)
    todo = f"choose one of {', '.join(COMMUNICATORS)}, or write module:name"
    raise UserError("comm", f"there is no {name!r}", todo)
