"""Outer steps of replicas that take local steps: called after each step, it has them exchange weight differences.

Between outer steps replicas do not communicate. The loss, gradient norm and verdict of a step are those of one
replica, and the log has the first replica's. All ranks agree on the mean loss and on stopping at outer steps: a rank
that is told to stop earlier continues until the next one.
"""

from __future__ import annotations

from typing import Any

import torch

from zeroshard.comm import CONTROL, labelled
from zeroshard.errors import ExitStatus
from zeroshard.train.loop.run import Run
from zeroshard.train.loop.stopping import as_numbers, wish_of_all


def outer_step_if_due(run: Run, loss: float, stop: ExitStatus, *, taken: bool) -> tuple[dict[str, Any], ExitStatus]:
    """Have replicas take an outer step after a step, if one is due. Collective.

    ``loss``, ``stop`` and ``taken`` are of this replica. Returns facts about the outer step for the step's record,
    empty if there was none; and the status with which all ranks stop, OK to continue.
    """
    outer = run.local_steps
    if outer is None:
        return {}, stop
    with run.clock.span("outer_step"):
        by_fragment = outer.step(taken=taken)
    if not by_fragment:
        return {}, ExitStatus.OK
    said: dict[str, Any] = {
        "arrived": [each.fragment for each in by_fragment],
        "num_bytes": sum(each.num_bytes for each in by_fragment),
        "difference_norm": sum(each.difference_norm**2 for each in by_fragment) ** 0.5,
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


def fragments_of_outer_step(run: Run) -> list[int]:
    """The fragments of the outer step after this step, for the plan; [] without local steps."""
    return [] if run.local_steps is None else run.local_steps.settings.fragments_at(run.local_steps.num_steps)
