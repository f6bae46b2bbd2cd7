"""Outer steps of replicas that take local steps: after a step, they exchange weight differences.

Between outer steps replicas do not communicate. The loss, gradient norm and verdict of a step are those of one
replica, and the log has the first replica's. All ranks agree on the mean loss and on stopping at outer steps: a rank
that is told to stop earlier continues until the next one.

Below: what replicas add to a run's checkpoint, and how a resumed run uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from zeroshard.comm import CONTROL, Communicator, labelled
from zeroshard.comm.agree import send_bytes
from zeroshard.comm.wrappers.stopwatch import Stopwatch
from zeroshard.host.errors import ExitStatus
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.train.loop.stopping import agreed_stop, as_numbers
from zeroshard.train.records.records import Callback, Update
from zeroshard.zero import OuterSteps


class OuterStepsTaken(Callback):
    """Has replicas take the outer steps that are due, and all ranks agree there on the loss and on stopping."""

    def __init__(self, outer: OuterSteps, comm: Communicator, clock: Stopwatch) -> None:
        self._outer, self._comm, self._clock = outer, comm, clock

    def on_update(self, update: Update) -> None:
        """Take an outer step if one is due; between them the wish to stop waits. ``update`` is of this replica."""
        with self._clock.span("outer_step"):
            by_fragment = self._outer.step(taken=update.taken)
        if not by_fragment:
            update.stop = ExitStatus.OK
            return
        report = torch.tensor([update.loss, *as_numbers(update.stop)], dtype=torch.float64)
        report = report.to(self._comm.control_device)
        with labelled(CONTROL):
            self._comm.all_reduce(report).wait()  # 24 bytes
        total, *wanted = report.tolist()
        update.stop = agreed_stop(*wanted)
        update.outer_step = {
            "arrived": [each.fragment for each in by_fragment],
            "num_bytes": sum(each.num_bytes for each in by_fragment),
            "difference_norm": sum(each.difference_norm**2 for each in by_fragment) ** 0.5,
            "num_replicas": self._outer.comm.world_size,
            "loss": total / self._comm.world_size,
        }


def guards_of_replicas(comm: Communicator, replica: Communicator, guard: StepGuard) -> list[dict[str, Any]]:
    """Collect the state of every replica's `StepGuard`, in the order of replicas. Collective over ``comm``."""
    own = json.dumps(guard.state_dict()).encode()
    firsts = range(0, comm.world_size, replica.world_size)
    return [json.loads(send_bytes(comm, own if comm.rank == first else b"", first)) for first in firsts]


def own_guard(saved: Mapping[str, Any], local_steps: OuterSteps | None) -> dict[str, Any] | None:
    """The saved guard state that this rank resumes from: its replica's, else the first one's; None: none was saved."""
    guards = saved.get("guards", [])
    number = 0 if local_steps is None else local_steps.comm.rank
    return guards[number] if number < len(guards) else saved.get("guard")


def other_replicas(before: Mapping[str, Any], world_before: int, now: Mapping[str, Any], world_now: int) -> list[str]:
    """Say what happens to replicas with local steps if their number, or whether there are any, has changed.

    Returns:
        A line for the log of a resumed run; empty if nothing has changed.
    """
    (was, count), (is_now, count_now) = (_replicas(*pair) for pair in ((before, world_before), (now, world_now)))
    if (was, count) == (is_now, count_now) or not (was or is_now):
        return []
    if was and not is_now:
        return ["replicas took local steps: the run resumes from their last common weights, without outer momentum"]
    if is_now and not was:
        return ["replicas take local steps from here on: each begins with the same optimizer states"]
    if count_now > count:
        what = "the new ones begin at the last common weights, with the first one's optimizer states"
    else:
        what = "the steps of the last ones since their last outer step are lost"
    return [f"there were {count} replicas, now there are {count_now}: {what}"]


def _replicas(config: Mapping[str, Any], world_size: int) -> tuple[bool, int]:
    """Whether replicas take local steps, and how many replicas there are (1 without local steps)."""
    on = config.get("local_steps", {}).get("every", 1) > 1
    return on, world_size // (config.get("shard_size") or world_size) if on else 1
