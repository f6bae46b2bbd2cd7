"""How many steps a run takes and what each consists of, from its settings and the number of ranks."""

from __future__ import annotations

from zeroshard.host.errors import UserError
from zeroshard.train.config.config import TrainConfig
from zeroshard.train.loop.run import Schedule

KEPT_AT_EVALUATIONS = 2  # of the checkpoints that are written at evaluations, by default


def schedule_of(config: TrainConfig, world_size: int) -> Schedule:
    """Return the schedule of ``config`` on ``world_size`` ranks; raises UserError as `accumulation_steps`."""
    at_evaluations = config.checkpoint_interval < 0
    kept = KEPT_AT_EVALUATIONS if at_evaluations else 0
    return Schedule(
        max_steps=config.max_steps,
        grad_clip=config.grad_clip,
        eval_interval=config.eval_interval,
        checkpoint_interval=config.eval_interval if at_evaluations else config.checkpoint_interval,
        # of state in a file there is no memory for copies
        checkpoint_async=config.checkpoint_async and not config.keeps_state_on_disk,
        keep_checkpoints=kept if config.keep_checkpoints < 0 else config.keep_checkpoints,
        keep_every=config.keep_every,
        keep_best=config.keep_best,
        grad_accum_steps=accumulation_steps(config, world_size),
        seed=config.seed,
        exact_sums=config.has_exact_sums,
    )


def tokens_of_step(config: TrainConfig, world_size: int) -> int:
    """Return the number of tokens of all ranks in a step."""
    at_once = config.micro_batch_size * config.num_groups(world_size)
    return at_once * accumulation_steps(config, world_size) * config.seq_len


def accumulation_steps(config: TrainConfig, world_size: int) -> int:
    """Return the number of micro-batches of each rank in a step.

    Raises:
        UserError: ``global_batch_size`` is set and does not divide into micro-batches for all ranks.
    """
    micro, rows, groups = config.micro_batch_size, config.global_batch_size, config.num_groups(world_size)
    if config.reproducible:  # the number of sequences in a step does not depend on the number of ranks
        at_once = micro * config.reproducible
        if rows % at_once:
            what = f"{rows} is no multiple of {micro} (micro_batch_size) x {config.reproducible} (reproducible)"
            raise UserError("global_batch_size", what, "change one of the three")
        return (rows or at_once * config.grad_accum_steps) // (micro * groups)
    if not rows:
        return config.grad_accum_steps
    size = world_size // groups
    named = f"{groups} ranks" if size == 1 else f"{groups} groups of {size} ranks that share sequences"
    if rows < groups:
        what = f"{rows} sequences cannot feed {named}"
        raise UserError("global_batch_size", what, f"use at least {groups}, or fewer ranks")
    if rows % (micro * groups):
        what = f"{rows} is no multiple of {micro} (micro_batch_size) x {named}"
        raise UserError("global_batch_size", what, "change one of the three")
    return rows // (micro * groups)
