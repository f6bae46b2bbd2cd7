"""Meetings of replicas that take local steps: called after each step, it lets them exchange weight differences.

Between meetings replicas do not communicate. The loss, gradient norm and verdict of a step are those of one replica,
and the log has the first replica's. All ranks agree on the mean loss and on stopping at the steps after which they
meet: a rank that is told to stop earlier continues until then.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm import CONTROL, labelled
from zeroshard.errors import ExitStatus
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.stopping import as_numbers, wish_of_all


def meet(run: Run, loss: float, stop: ExitStatus, *, taken: bool) -> tuple[dict[str, Any], ExitStatus]:
    """Let replicas meet after a step if a meeting is due. Collective.

    ``loss``, ``stop`` and ``taken`` are of this replica. Returns facts about the meeting for the step's record, empty
    if there was none; and the status with which all ranks stop, OK to continue.
    """
    outer = run.local_steps
    if outer is None:
        return {}, stop
    with run.clock.span("meeting"):
        met = outer.step(taken=taken)
    if not met:
        return {}, ExitStatus.OK
    said: dict[str, Any] = {
        "arrived": [meeting.fragment for meeting in met],
        "num_bytes": sum(meeting.num_bytes for meeting in met),
        "difference_norm": sum(meeting.difference_norm**2 for meeting in met) ** 0.5,
        "num_replicas": outer.comm.world_size,
    }
    said["loss"], stop = _agree(run, loss, stop)
    return said, stop


def _agree(run: Run, loss: float, stop: ExitStatus) -> tuple[float, ExitStatus]:
    """Return the mean loss over all replicas and the status with which to stop: one all-reduce of 24 bytes."""
    comm = run.strategy.comm
    report = torch.tensor([loss, *as_numbers(stop)], dtype=torch.float64)
    report = report.to(comm.control_device)
    with labelled(CONTROL):
        comm.all_reduce(report).wait()
    total, *wanted = report.tolist()
    return total / comm.world_size, wish_of_all(*wanted)


def fragments_that_met(run: Run) -> list[int]:
    """The fragments that met after this step, for the plan; [] without local steps."""
    return [] if run.local_steps is None else run.local_steps.settings.fragments_at(run.local_steps.num_steps)
