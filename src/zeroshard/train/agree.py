"""One rank does something for all, and all learn whether it went well.

Preparing data or making the run folder is rank 0's work. Were its failure its own, the others would wait in the
next collective for a rank that is gone; so they learn of it, word by word, and end as it does.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

from zeroshard.comm import CONTROL, Communicator, scope
from zeroshard.errors import UserError


def first_rank_does(comm: Communicator, work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0 while the others wait; collective.

    Raises:
        UserError: ``work`` raised it on rank 0; every rank raises the same one.
        Exception: on rank 0 whatever else ``work`` raised; on the others a RuntimeError that says so.
    """
    failure: Exception | None = None
    if comm.rank == 0:
        try:
            work()
        except Exception as error:  # noqa: BLE001 -- raised again below, once the others know
            failure = error
    words = _send(comm, json.dumps(_describe(failure)) if failure else "")
    if failure is not None:
        raise failure
    if words:
        field, what, todo = json.loads(words)
        if field:
            raise UserError(field, what, todo)
        raise RuntimeError(f"rank 0 failed: {what}")


def _describe(failure: Exception) -> tuple[str, str, str]:
    if isinstance(failure, UserError):
        return failure.field, failure.what, failure.todo
    return "", f"{type(failure).__name__}: {failure}", ""


def _send(comm: Communicator, text: str) -> str:
    """Rank 0's ``text`` on every rank."""
    content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=comm.control_device)
    length = torch.tensor([content.numel()], device=comm.control_device)
    with scope(CONTROL):
        comm.broadcast(length, src=0).wait()
        if comm.rank != 0:
            content = torch.empty(int(length), dtype=torch.uint8, device=comm.control_device)
        if length.item():
            comm.broadcast(content, src=0).wait()
    return bytes(content.tolist()).decode()
