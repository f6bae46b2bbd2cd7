"""Communicators by name: the values of ``--comm`` and of the benchmarks' options.

To add one, write a class with the methods of `zeroshard.comm.Communicator` in one file, and add one row to
`COMMUNICATORS`. Error messages, ``--help`` and the validation of settings read the rows, which needs
no torch. ``--comm module:name`` names a user's own communicator: it has no row, and all properties at their defaults.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zeroshard.host.errors import UserError
from zeroshard.host.lazily import is_address, made_at

if TYPE_CHECKING:
    from zeroshard.comm.base import Communicator


@dataclass(frozen=True, slots=True)
class CommEntry:
    """A row of `COMMUNICATORS`; calling it makes the communicator, once torch.distributed's default group exists."""

    # a class or function that takes no arguments and returns a `Communicator`, or its ``module:name``. If the
    # communicator has a ``close`` method, it is called at the end of the run.
    factory: str | Callable[[], Communicator]
    cpu_only: bool = False  # whether it moves only CPU tensors
    # whether its bytes pass through the network: ranks of several hosts can use it, and a link that is slowed in the
    # kernel (``--link.mode netns``) slows it
    over_network: bool = True
    alone: bool = False  # whether it is also made in a world of one rank; if not, that rank gets a `LocalCommunicator`

    def __call__(self) -> Communicator:
        """Make the communicator."""
        return made_at(self.factory, "comm", ("rank", "world_size", "all_reduce", "reduce_scatter", "all_gather"))


COMMUNICATORS: dict[str, CommEntry] = {
    "torch": CommEntry("zeroshard.comm.backends.torch_dist:TorchCommunicator", alone=True),
    "ring": CommEntry("zeroshard.comm.ring.ring:RingCommunicator", cpu_only=True),
    "shm": CommEntry("zeroshard.comm.shm.shm:SharedMemoryCommunicator", cpu_only=True, over_network=False),
}


def comm_entry(name: str) -> CommEntry:
    """Return the row of ``name``, or for ``module:name`` a row with all defaults; imports nothing.

    Raises:
        UserError: no communicator has this name.
    """
    if name in COMMUNICATORS:
        return COMMUNICATORS[name]
    if is_address(name):
        return CommEntry(name)
    todo = f"choose one of {', '.join(COMMUNICATORS)}, or write module:name"
    raise UserError("comm", f"there is no {name!r}", todo)


def name_of(comm: Communicator) -> str:
    """Return the name of the row that makes ``comm``, or what it wraps; empty for a communicator of no row."""
    while (inner := getattr(comm, "inner", None)) is not None:
        comm = inner
    made_by = f"{type(comm).__module__}:{type(comm).__qualname__}"
    return next((name for name, entry in COMMUNICATORS.items() if entry.factory == made_by), "")
