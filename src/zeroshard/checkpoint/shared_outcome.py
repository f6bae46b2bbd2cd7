"""Ranks that work on one checkpoint agree after each phase whether it succeeded, and if not, why.

A rank that fails does not leave the others waiting: all ranks raise, with the message of the first rank that failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError
from zeroshard.zero.tensor_broadcast import send_bytes


def fail_together(comm: Communicator, phase: str, work: Callable[[], object]) -> None:
    """Run this rank's part of a phase; raise on every rank if it failed on any. Collective.

    Raises:
        OSError: the phase raised an OSError on some rank. That rank raises its own error; the others raise one that
            names the rank.
        ValueError: likewise for a ValueError; a UserError is raised unchanged on every rank.
    """
    failure: OSError | ValueError | None = None
    try:
        work()
    except (OSError, ValueError) as error:
        failure = error
    told = first_message(comm, None if failure is None else json.dumps(_describe(failure)))
    if failure is not None:
        raise failure
    if told is not None:
        rank, words = told
        kind, *what = json.loads(words)
        if kind == "UserError":
            raise UserError(*what)
        raise (OSError if kind == "OSError" else ValueError)(f"{what[0]} (rank {rank}, {phase})")


def _describe(failure: OSError | ValueError) -> list[str]:
    if isinstance(failure, UserError):
        return ["UserError", failure.field, failure.what, failure.todo]
    return ["OSError" if isinstance(failure, OSError) else "ValueError", str(failure)]


def first_message(comm: Communicator, words: str | None) -> tuple[int, str] | None:
    """Return the lowest rank whose ``words`` is not None, with its text; None if no rank has any. Collective."""
    size = comm.world_size
    first = size - largest(comm, 0 if words is None else size - comm.rank)
    return None if first == size else (first, send_bytes(comm, (words or "").encode(), first).decode())


def largest(comm: Communicator, number: int) -> int:
    """Return the maximum of the ranks' numbers; also acts as a barrier. Collective."""
    message = torch.tensor([number], device=comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return int(message)
