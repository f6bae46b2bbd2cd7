"""Ranks that work on one checkpoint agree after each phase whether it went well, and why not.

A rank that fails does not leave the others waiting: all of them raise, with the words of the first that failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError
from zeroshard.zero.transfer import send_bytes


def fail_together(comm: Communicator, phase: str, work: Callable[[], object]) -> None:
    """Run this rank's part of a phase; raise on every rank when it failed on any. Collective.

    Raises:
        OSError: the phase failed with one on some rank; its own on that rank, one that names it on the others.
        ValueError: as above; a UserError is the same one on every rank.
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
    """The first rank that has ``words``, and what they are; None where no rank has any. Collective."""
    size = comm.world_size
    first = size - largest(comm, 0 if words is None else size - comm.rank)
    return None if first == size else (first, send_bytes(comm, (words or "").encode(), first).decode())


def largest(comm: Communicator, number: int) -> int:
    """The largest of the ranks' numbers; also a barrier. Collective."""
    message = torch.tensor([number], device=comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(message, op="max").wait()
    return int(message)
