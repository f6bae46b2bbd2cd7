"""The table ``[local_steps]`` of a run's settings: local steps (DiLoCo).

A replica is a group of ``shard_size`` ranks. With local steps each replica trains by itself for ``every`` steps. Then
the replicas take an *outer step*: they average their weight differences, and an outer optimizer applies the mean. See
`zeroshard.zero.local_steps.local_steps`.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from zeroshard.host.errors import UserError
from zeroshard.settings.base import Config
from zeroshard.settings.rules import check_local_steps

# Largest outer_lr / (1 - outer_momentum) for which a run from new weights prints no warning: 1.4 made the loss 2 %
# worse, 2.0 more than that, and 7 (DiLoCo's) 25 %. See docs/slow-links.md.
MOST_FROM_NEW_WEIGHTS = 1.5


class LocalStepsConfig(Config):
    """Whether replicas (groups of ``shard_size`` ranks) take local steps, and how they synchronise (DiLoCo)."""

    every: int = Field(
        1,
        ge=1,
        description="Local steps of each replica (shard_size ranks) for each outer step; 1: gradients at each step.",
    )
    outer_lr: float = Field(
        0.7, gt=0, allow_inf_nan=False, description="Learning rate of the outer optimizer, which moves common weights."
    )
    outer_momentum: float = Field(0.9, ge=0, lt=1, description="Nesterov momentum of the outer optimizer.")
    fragments: int = Field(
        1, ge=1, description="Parts of the model that synchronise at different steps, each after `every` of them."
    )
    wire: Literal["float32", "bfloat16", "e4m3", "fp8", "int8", "int4"] = Field(
        "float32", description="Wire format of differences: a type, or numbers that share a scale by blocks of 256."
    )

    @property
    def on(self) -> bool:
        """Whether replicas take local steps, that is, do not reduce gradients between them at each step."""
        return self.every > 1

    @model_validator(mode="after")
    def _outer_steps_are_possible(self) -> Self:
        given = self.changed()
        if given and not self.on:
            what = f"{getattr(self, given[0])} is given, and local_steps.every is 1: replicas take no local steps"
            raise UserError(f"local_steps.{given[0]}", what, "add --local-steps.every 32, or leave it out")
        if self.fragments > self.every:
            what = (
                f"{self.fragments} fragments cannot synchronise at different steps of {self.every} (local_steps.every)"
            )
            raise UserError("local_steps.fragments", what, f"give at most {self.every}")
        return self


def check_num_replicas(config: Any, world_size: int) -> None:
    """Raise UserError if local steps of ``config``, the `TrainConfig`, are on and all ranks form a single replica.

    A run with its nnodes as ``2:4`` is elastic: it may be down to one replica because it lost machines.
    """
    least, _, most = config.nnodes.partition(":")
    if config.local_steps.on and (not most or least == most):
        check_local_steps("local_steps.every", config.local_steps.every, config.shard_size, world_size)


def steps_after_last_outer_step(local_steps: LocalStepsConfig, max_steps: int) -> str:
    """Return a warning if another ``max_steps`` would leave fewer final steps without an outer step; else "".

    Steps after the last outer step are missing from the common weights, which are what evaluation and export read.
    """
    every, fragments = local_steps.every, local_steps.fragments

    def missed(steps: int) -> int:  # by the fragment whose outer step is longest ago
        return max((steps - (fragment + 1) * every // fragments) % every for fragment in range(fragments))

    near = range(max(1, max_steps - every), max_steps + every)
    least = min(map(missed, near))
    if not local_steps.on or missed(max_steps) == least:
        return ""
    nearest = sorted((steps for steps in near if missed(steps) == least), key=lambda steps: abs(steps - max_steps))
    what = f"at max_steps = {max_steps} what is saved misses up to {missed(max_steps)} of the last steps"
    return f"local_steps.every: {what}; with {' or '.join(map(str, sorted(nearest[:2])))} it misses {least}"


def early_momentum(local_steps: LocalStepsConfig) -> str:
    """Return a warning if the outer optimizer would move weights much further than the replicas did; else "".

    That is harmful for newly initialised weights: the first differences are the largest, and predict least where
    training will go. See docs/slow-links.md.
    """
    factor = local_steps.outer_lr / (1 - local_steps.outer_momentum)
    if not local_steps.on or factor <= MOST_FROM_NEW_WEIGHTS:
        return ""
    what = (
        f"{local_steps.outer_momentum} with local_steps.outer_lr = {local_steps.outer_lr} moves common weights by up "
        f"to {factor:.2g} times what replicas changed, and from new weights that may cost much of the loss"
    )
    todo = "train the first tenth or fifth without --local-steps.every and resume with it by --resume auto, or give 0.5"
    return f"local_steps.outer_momentum: {what}; {todo}"
