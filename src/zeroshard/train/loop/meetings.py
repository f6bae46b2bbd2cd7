"""Meetings of replicas that take local steps: called after each step, it lets them exchange weight differences.

Between meetings replicas do not communicate. The loss, gradient norm and verdict of a step are those of one replica,
and the log has the first replica's. With ``overlap_steps`` a difference is sent at one step and taken in some steps
later. All ranks agree on the mean loss and on stopping at the steps that take differences in: a rank that is told to
stop earlier continues until then. They do not agree at steps that only send, because that collective would wait for the
differences to arrive, and nothing of their transfer would overlap with computation.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm import CONTROL, scope
from zeroshard.errors import ExitStatus
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.stopping import as_numbers, wish_of_all
from zeroshard.train.records.plan_contract import Moves


def meet(run: Run, loss: float, stop: ExitStatus, *, taken: bool) -> tuple[dict[str, Any], ExitStatus]:
    """Let replicas meet after a step if a meeting is due. Collective.

    ``loss``, ``stop`` and ``taken`` are of this replica. Returns facts about the meeting for the step's record, empty
    if no difference was sent or taken in; and the status with which all ranks stop, OK to continue.
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
    """Return the mean loss over all replicas and the status with which to stop: one all-reduce of 24 bytes."""
    comm = run.strategy.comm
    report = torch.tensor([loss, *as_numbers(stop)], dtype=torch.float64)
    report = report.to(comm.control_device)
    with scope(CONTROL):
        comm.all_reduce(report).wait()
    total, *wanted = report.tolist()
    return total / comm.world_size, wish_of_all(*wanted)


def moves(run: Run) -> Moves | None:
    """The fragments whose differences were sent and taken in at this step, for the plan; None without replicas."""
    replicas = run.replicas
    if replicas is None:
        return None
    settings, num_steps = replicas.settings, replicas.num_steps
    return Moves(tuple(replicas.left), tuple(settings.leaving(num_steps - settings.overlap_steps)))
