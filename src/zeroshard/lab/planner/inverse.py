"""Answers inverse questions by bisection over plans: the largest micro-batch that fits, the fewest GPUs, and the lowest
bandwidth that is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from zeroshard.errors import UserError
from zeroshard.lab.planner.changes import fewest_gpus
from zeroshard.lab.planner.planner import Planner

MOST_SEQUENCES = 2**20  # the largest micro-batch that the search considers
KEEPS = 0.9  # share of the speed on an infinitely fast network that a stage must keep
LOWEST_BYTES_PER_S, HIGHEST_BYTES_PER_S = 1e6, 1e13
EXACTNESS = 0.01  # relative precision of a bandwidth


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    ``value``: the number; None if there is none. ``sentence``: the answer in words. ``rows``: the rows compared for it.
    """

    value: float | None
    unit: str
    sentence: str
    rows: tuple[Mapping[str, Any], ...] = ()


def largest_micro_batch(planner: Planner, stage: int) -> Answer:
    """The largest micro-batch, in rows, that fits at ``stage``."""
    name = f"stage {stage} on {planner.cluster.world_size:,} x {planner.device.name}"
    found = most(lambda rows: planner.on(global_batch=0).row(stage, rows).fits, MOST_SEQUENCES)
    if not found:
        return Answer(None, "sequences", f"No micro-batch fits at {name}.")
    least = "at least " if found == MOST_SEQUENCES else ""  # the search stops there
    return Answer(
        found, "sequences", f"The largest micro-batch at {name} is {least}{found} x {planner.workload.seq_len} tokens."
    )


def fewest(planner: Planner, stages: tuple[int, ...], micro_batch: int) -> Answer:
    """The smallest world, in full nodes, in which one of ``stages`` fits."""
    found = fewest_gpus(planner, stages, micro_batch)
    if found is None:
        at = "any stage" if len(stages) > 1 else f"stage {stages[0]}"
        return Answer(None, "GPUs", f"No number of GPUs is enough at {at} with micro-batch {micro_batch}.")
    if found == 1:
        return Answer(found, "GPUs", f"One GPU is enough, with micro-batch {micro_batch}.")
    there = planner.on(world_size=found, global_batch=0)
    lowest = next(stage for stage in sorted(stages) if there.row(stage, micro_batch).fits)
    at = f"stage {lowest}, the lowest that fits there," if len(stages) > 1 else f"stage {lowest}"
    return Answer(found, "GPUs", f"{found:,} GPUs are the fewest, at {at} with micro-batch {micro_batch}.")


def lowest_bandwidth(planner: Planner, stage: int, micro_batch: int, keeps: float = KEEPS) -> Answer:
    """The lowest network bandwidth at which ``stage`` keeps the share ``keeps`` of its speed on a fast network."""
    require_network(planner)
    best = on_network(planner, HIGHEST_BYTES_PER_S).row(stage, micro_batch).tokens_per_s

    def slow(bytes_per_s: float) -> bool:
        return on_network(planner, bytes_per_s).row(stage, micro_batch).tokens_per_s < keeps * best

    found = _border(slow)
    if found is None:
        return Answer(None, "bytes/s", f"Stage {stage} keeps {keeps:.0%} of its speed on any network.")
    rate = f"{found * 8 / 1e9:.3g} Gbit/s"
    return Answer(found, "bytes/s", f"Stage {stage} keeps {keeps:.0%} of its speed from {rate} for each GPU upwards.")


def most(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that ``fits``, assuming that all smaller numbers fit too; 0 if none does."""
    low, high = 0, 1
    while high <= limit and fits(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _border(below: Callable[[float], bool]) -> float | None:
    """The lowest bandwidth at which ``below`` is False; None if it is False at every bandwidth."""
    low, high = LOWEST_BYTES_PER_S, HIGHEST_BYTES_PER_S
    if not below(low):
        return None
    while high > low * (1 + EXACTNESS):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if below(middle) else (low, middle)
    return high


def on_network(planner: Planner, bytes_per_s: float) -> Planner:
    """A copy of ``planner`` with this bandwidth between nodes, or within the node if there is only one."""
    if planner.cluster.world_size <= planner.cluster.ranks_per_node:
        within = planner.cluster.within  # measured collectives do not apply to another link
        return planner.on(within=replace(within, name="asked", bytes_per_s=bytes_per_s, collectives={}))
    return planner.on(between=replace(planner.cluster.between, name="asked", bytes_per_s=bytes_per_s))


def require_network(planner: Planner) -> None:
    """Raise UserError if there is only one GPU."""
    if planner.cluster.world_size == 1:
        raise UserError("gpus", "1 sends nothing, at any stage", "give 2 or more")
