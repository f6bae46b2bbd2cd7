"""What a step adds where replicas take local steps: a meeting now and then, and a word among all ranks at each.

Between meetings replicas know nothing of each other: the loss, the norm and the verdict of a step are a replica's, and
those that are recorded are the first one's. Whether to stop is agreed on where differences are taken in: a rank that is
told to stop in between goes on until then. Where they only leave, a word among all ranks would wait for them to arrive,
and nothing of their way would be hidden.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm import CONTROL, scope
from zeroshard.errors import ExitStatus
from zeroshard.train.loop.run import Run
from zeroshard.train.records.plan_contract import Moves

_WISHES = (ExitStatus.PREEMPTED, ExitStatus.TERMINATED)  # the later one wins


def meet(run: Run, loss: float, stop: ExitStatus, *, taken: bool) -> tuple[dict[str, Any], ExitStatus]:
    """A step is over: let replicas meet if it is time. Collective.

    Args:
        run: whose step.
        loss: of the step, the mean over this replica.
        stop: what this replica wants.
        taken: whether this replica took the step.

    Returns:
        What a record says of the meeting, empty where nothing left or arrived; and what all ranks stop with.
    """
    replicas = run.replicas
    if replicas is None:
        return {}, stop
    with run.clock.span("meeting"):
        met = replicas.step(taken=taken)
    if not replicas.meets(replicas.num_steps):
        return {}, ExitStatus.OK
    said: dict[str, Any] = {
        "sent": list(replicas.left),
        "arrived": [meeting.fragment for meeting in met],
        "num_bytes": sum(meeting.num_bytes for meeting in met),
        "difference_norm": sum(meeting.difference_norm**2 for meeting in met) ** 0.5,
        "num_replicas": replicas.comm.world_size,
    }
    if not replicas.takes_in(replicas.num_steps):
        return said, ExitStatus.OK
    said["loss"], stop = _agree(run, loss, stop)
    return said, stop


def _agree(run: Run, loss: float, stop: ExitStatus) -> tuple[float, ExitStatus]:
    """The mean loss over all replicas, and whether any rank wants to stop: one message of 24 bytes."""
    comm = run.strategy.comm
    report = torch.tensor([loss, *(float(stop == wish) for wish in _WISHES)], dtype=torch.float64)
    report = report.to(comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(report).wait()
    total, *wishes = report.tolist()
    wanted = [wish for wish, count in zip(_WISHES, wishes, strict=True) if count]
    return total / comm.world_size, wanted[-1] if wanted else ExitStatus.OK


def moves(run: Run) -> Moves | None:
    """Which fragments left and arrived at this step, for the plan; None where none can have."""
    replicas = run.replicas
    if replicas is None:
        return None
    settings, num_steps = replicas.settings, replicas.num_steps
    return Moves(tuple(replicas.left), tuple(settings.leaving(num_steps - settings.overlap_steps)))
