"""Checks that ranks which build the same object together were given the same arguments, and raises on all if not.

Without the check, a rank that was given other parameters, or whose constructor raised, would leave the other ranks
blocked in a collective.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from hashlib import sha256
from itertools import zip_longest

import torch

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.zero.tensor_broadcast import send_bytes

_ERRORS: dict[str, type[Exception]] = {"TypeError": TypeError, "ValueError": ValueError}


@contextmanager
def agreement(
    comm: Communicator, what: str = "params", todo: str = "give every rank the same parameters in the same order"
) -> Generator[list[str]]:
    """At the end of this block compare the descriptions that each rank has appended to the list. Collective.

    Args:
        comm: all ranks.
        what: the argument that is described.
        todo: advice, for the error, to a user who has given ranks different arguments.

    Raises:
        Exception: the error that the block raised on this rank; else that of the first rank on which it raised (a
            TypeError or ValueError as such, another one as a RuntimeError), with that rank's number.
        ValueError: ranks have appended different descriptions; it names the first that differs.
    """
    described: list[str] = []
    try:
        yield described
    except Exception as error:
        _exchange(comm, described, error, what, todo)
        raise
    _exchange(comm, described, None, what, todo)


def _exchange(comm: Communicator, described: list[str], error: Exception | None, what: str, todo: str) -> None:
    if comm.world_size == 1:
        return
    failed, count, digest = _gather(comm, [error is not None, len(described), _digest("\n".join(described))])
    if error is not None:
        send_bytes(comm, f"{type(error).__name__}\n{error}".encode(), failed.index(1))
        return
    if any(failed):
        first = failed.index(1)
        name, _, text = send_bytes(comm, b"", first).decode().partition("\n")
        raise _ERRORS.get(name, RuntimeError)(f"rank {first}: {text}")
    for rank, other in enumerate(zip(count, digest, strict=True)):
        if other != (count[0], digest[0]):
            ours, theirs = _first_difference(comm, described, rank)
            raise ValueError(f"{what}: rank 0 has {ours}, rank {rank} has {theirs}; {todo}")


def _first_difference(comm: Communicator, described: list[str], rank: int) -> tuple[str, str]:
    """Return the first descriptions in which rank 0 and ``rank`` differ. Collective, for all ranks."""
    lists = [send_bytes(comm, "\n".join(described).encode(), r).decode().split("\n") for r in (0, rank)]
    return next((ours, theirs) for ours, theirs in zip_longest(*lists, fillvalue="nothing more") if ours != theirs)


def _gather(comm: Communicator, numbers: list[int]) -> list[list[int]]:
    """All-gather ``numbers``: return for each of them a list of its values by rank. Collective."""
    own = torch.tensor(numbers, dtype=torch.int64, device=comm.control_device)
    found = torch.empty(comm.world_size * len(numbers), dtype=torch.int64, device=comm.control_device)
    with scope(CONTROL):
        comm.all_gather(found, own).wait()
    return found.view(comm.world_size, len(numbers)).T.tolist()


def _digest(text: str) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:8], "big", signed=True)
