"""What replicas that take local steps add to a run's checkpoint, and what a run that goes on makes of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zeroshard.comm import Communicator
from zeroshard.train.loop.step_guard import StepGuard
from zeroshard.zero import Replicas
from zeroshard.zero.transfer import send_bytes


def guards_of_replicas(comm: Communicator, replica: Communicator, guard: StepGuard) -> list[dict[str, Any]]:
    """Each replica's guard, which judges that replica's steps alone, in order. Collective over ``comm``."""
    own = json.dumps(guard.state_dict()).encode()
    firsts = range(0, comm.world_size, replica.world_size)
    return [json.loads(send_bytes(comm, own if comm.rank == first else b"", first)) for first in firsts]


def own_guard(saved: Mapping[str, Any], replicas: Replicas | None) -> dict[str, Any] | None:
    """The guard's state that this rank goes on from: its replica's, else the first one's; None: none was saved."""
    guards = saved.get("guards", [])
    number = 0 if replicas is None else replicas.comm.rank
    return guards[number] if number < len(guards) else saved.get("guard")


def other_replicas(before: Mapping[str, Any], world_before: int, now: Mapping[str, Any], world_now: int) -> list[str]:
    """What becomes of replicas that took local steps, where there are others now; empty where there are as many."""
    (was, count), (is_now, count_now) = (_replicas(*pair) for pair in ((before, world_before), (now, world_now)))
    if (was, count) == (is_now, count_now) or not (was or is_now):
        return []
    if was and not is_now:
        return ["replicas took local steps: the run goes on from their last common weights, without outer momentum"]
    if is_now and not was:
        return ["replicas take local steps from here on: each begins with the same optimizer states"]
    if count_now > count:
        what = "the new ones begin at the last common weights, with the first one's optimizer states"
    else:
        what = "what the last ones did since their last meeting is left out"
    return [f"there were {count} replicas, now there are {count_now}: {what}"]


def _replicas(config: Mapping[str, Any], world_size: int) -> tuple[bool, int]:
    """Whether replicas take local steps, and how many there are."""
    on = config.get("replicas", {}).get("every", 1) > 1
    return on, world_size // (config.get("shard_size") or world_size) if on else 1
