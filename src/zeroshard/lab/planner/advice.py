"""Recommends a row of a plan and gives the reason; `changes` says what to change where no row fits.

The rule is that of `docs/how-to/choose-a-stage.md`: the lowest stage that fits with room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner

GIB = 2**30
AS_FAST = 0.01  # rates that differ by a smaller share count as equal
WITH_ROOM = 0.9  # share of the fastest row's rate: a stage that reaches it has room for a good micro-batch
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def recommended(rows: Iterable[Row]) -> Row | None:
    """The recommended row: one of the lowest stage that fits with room; None if no row fits.

    A stage has room, that is memory for a good micro-batch, if its fastest fitting row is at least `WITH_ROOM` times as
    fast as the fastest of all fitting rows. The result is that stage's fastest row, or among equally fast ones the row
    with the most headroom.
    """
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    enough = WITH_ROOM * max(row.tokens_per_s for row in fitting)
    stage = min(_order(row) for row in fitting if row.tokens_per_s >= enough)
    of_stage = [row for row in fitting if _order(row) == stage]
    fastest = max(row.tokens_per_s for row in of_stage)
    return max((r for r in of_stage if r.tokens_per_s >= fastest * (1 - AS_FAST)), key=lambda r: r.headroom_bytes)


def describe(row: Row, world_size: int) -> str:
    """Describe a row in words: ``stage 3 over 8 GPUs, replicated 8 times, micro-batch 4``."""
    accumulated = f" x {row.num_micro}" if row.num_micro > 1 else ""
    micro_batch = f"micro-batch {row.micro_batch}{accumulated}"
    if row.any_stage:
        return f"{micro_batch} on one GPU"
    stage = "the given row" if row.stage is None else f"stage {row.stage}"
    if row.node_copy:
        stage += f" with a second copy over {row.node_copy}"
    if row.node_size:
        stage += f", gradients added up in nodes of {row.node_size}"
    if row.shard_size < world_size:
        stage += f" over {row.shard_size} GPUs, replicated {world_size // row.shard_size} times"
    if row.outer_steps.every > 1:
        stage += f", with an outer step every {row.outer_steps.every:,} steps"
    return f"{stage}, {micro_batch}"


def _spread(row: Row) -> str:
    """The likely range of the row's rate, as text; empty if the device was measured."""
    if row.spread == (1.0, 1.0):
        return ""
    least, most = row.tokens_per_s_range
    return f" (likely {least:,.0f} to {most:,.0f}: plans of four of five published runs were that close)"


def _bottleneck(row: Row) -> str:
    """The bottleneck of a row in a sentence; of a host that binds also how many operations it issues."""
    if row.binds != "kernel launches" or not row.timing.num_operations:
        return row.binds
    timing = row.timing
    each_us = timing.issue_s / timing.num_operations * 1e6
    return f"the host, which issues {timing.num_operations:,} operations a step, each in {each_us:.0f} us"


def reason(planner: Planner, rows: Sequence[Row], best: Row) -> str:
    """Why ``best`` is recommended: its predictions, why no lower stage is, and what would be faster."""
    world_size = planner.cluster.world_size
    stages = sorted({row.stage for row in rows if row.stage is not None})
    rule = ", the lowest stage that fits with room" if len(stages) > 1 else ""
    free, memory = best.headroom_bytes / GIB, planner.device.memory_bytes / GIB
    sentences = [
        f"Take {describe(best, world_size)}{rule}: {best.tokens_per_s:,.0f} tokens/s{_spread(best)}, "
        f"{free:.1f} of {memory:.1f} GiB "
        f"stay free, and the bottleneck is {_bottleneck(best)}."
    ]
    fitting = [row for row in rows if row.fits]
    if best.any_stage:
        sentences.append("One GPU has nothing to shard: every stage is the same there.")
    out = [stage for stage in stages if all(row.stage != stage for row in fitting)]
    if out:
        sentences.append(f"{_stages_named(out)} {'does' if len(out) == 1 else 'do'} not fit.")
    for stage in stages:
        lower = [row.tokens_per_s for row in fitting if row.stage == stage]
        if lower and best.stage is not None and stage < best.stage:
            sentences.append(f"Stage {stage} fits, and is {1 - max(lower) / best.tokens_per_s:.0%} slower.")
    fastest = max(fitting, key=lambda row: row.tokens_per_s)
    lead = fastest.tokens_per_s / best.tokens_per_s - 1
    if lead > AS_FAST:
        faster = describe(fastest, world_size)
        sentences.append(
            f"{faster[:1].upper()}{faster[1:]} is {lead:.0%} faster; a plan cannot be sure of less than "
            f"{1 - WITH_ROOM:.0%}, so the lower stage is taken: `zeroshard bench step` measures both."
        )
    return " ".join(sentences)


def _order(row: Row) -> int:
    return -1 if row.stage is None else row.stage


def _stages_named(stages: Sequence[int]) -> str:
    """Name stages in words: ``Stage 1``, ``Stages 0, 1 and 2``."""
    *most, last = map(str, stages)
    return f"Stages {', '.join(most)} and {last}" if most else f"Stage {last}"
