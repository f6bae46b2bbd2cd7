"""Answers to questions: their type, and the fewest GPUs on which a model fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zeroshard.lab.planner.changes import fewest_gpus
from zeroshard.lab.planner.planner import Planner


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    ``value``: the number; None if there is none. ``sentence``: the answer in words. ``rows``: the rows compared for it.
    """

    value: float | None
    unit: str
    sentence: str
    rows: tuple[Mapping[str, Any], ...] = ()


def fewest(planner: Planner, stages: tuple[int, ...], micro_batch: int) -> Answer:
    """The smallest world, in full nodes, in which one of ``stages`` fits."""
    found = fewest_gpus(planner, stages, micro_batch)
    if found is None:
        at = "any stage" if len(stages) > 1 else f"stage {stages[0]}"
        return Answer(None, "GPUs", f"No number of GPUs is enough at {at} with micro-batch {micro_batch}.")
    if found == 1:
        return Answer(found, "GPUs", f"One GPU is enough, with micro-batch {micro_batch}.")
    there = planner.on(world_size=found, global_batch=None)
    lowest = next(stage for stage in sorted(stages) if there.row(stage, micro_batch).fits)
    at = f"stage {lowest}, the lowest that fits there," if len(stages) > 1 else f"stage {lowest}"
    return Answer(found, "GPUs", f"{found:,} GPUs are the fewest, at {at} with micro-batch {micro_batch}.")
