"""What to do about a plan, in a sentence: the row to take and why, or the nearest change that makes one fit."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.models import LanguageModel
from zeroshard.zero import ShardingStrategy

GIB = 2**30
AS_FAST = 0.01  # rates that differ by less are called equal
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)


def recommended(rows: Iterable[Row]) -> Row | None:
    """The fastest that fits; among those as fast, the one with the most memory left."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    fastest = max(row.tokens_per_s for row in fitting)
    return max((r for r in fitting if r.tokens_per_s >= fastest * (1 - AS_FAST)), key=lambda r: r.headroom_bytes)


def describe(row: Row, world_size: int) -> str:
    """A row in words: ``stage 3 over 8 GPUs, replicated 8 times, micro-batch 4``."""
    stage = "the given row" if row.stage is None else f"stage {row.stage}"
    if row.shard_size < world_size:
        stage += f" over {row.shard_size} GPUs, replicated {world_size // row.shard_size} times"
    accumulated = f" x {row.num_micro}" if row.num_micro > 1 else ""
    return f"{stage}, micro-batch {row.micro_batch}{accumulated}"


def reason(planner: Planner, rows: Sequence[Row], best: Row) -> str:
    """Why ``best`` is the one to take: how much faster than what, and what does not fit."""
    world_size = planner.cluster.world_size
    text = f"Take {describe(best, world_size)}: {best.tokens_per_s:,.0f} tokens/s"
    others = [row for row in rows if row.fits and (row.stage, row.shard_size) != (best.stage, best.shard_size)]
    rival = max(others, key=lambda row: row.tokens_per_s, default=None)
    if rival is not None:
        lead = best.tokens_per_s / rival.tokens_per_s - 1
        named = describe(rival, world_size)
        if lead > AS_FAST:
            text += f", {lead:.0%} more than {named}"
        else:
            text += f", as fast as {named} with {(best.headroom_bytes - rival.headroom_bytes) / GIB:.1f} GiB more left"
    text += f"; {best.headroom_bytes / GIB:.1f} GiB of {planner.device.memory_bytes / GIB:.1f} stay free"
    fitting = {row.stage for row in rows if row.fits}
    out = sorted({row.stage for row in rows if row.stage is not None} - fitting)
    if out:
        text += f", {'stage' if len(out) == 1 else 'stages'} {_listed(out)} {'does' if len(out) == 1 else 'do'} not fit"
    return text + f"; the bottleneck is {best.binds}."


def nearest_change(
    planner: Planner, stages: Sequence[int | ShardingStrategy], micro_batch: int | None, rows: Sequence[Row]
) -> str:
    """The first of these that makes a row fit, in a sentence: less a micro-batch, recomputation, more GPUs, shorter
    sequences.
    """
    best = min(rows, key=lambda row: row.needed_bytes)
    gib = f"{best.needed_bytes / GIB:.1f} GiB where {planner.device.memory_bytes / GIB:.1f} are"
    start = f"Nothing fits: {describe(best, planner.cluster.world_size)} needs {gib}"
    stage = stages[-1]
    if micro_batch is not None and micro_batch > 1:
        smaller = next((m for m in reversed(MICRO_BATCHES) if m < micro_batch and _fits(planner, stage, m)), None)
        if smaller is not None:
            return f"{start}; micro-batch {smaller} would fit."
    smallest = next((m for m in MICRO_BATCHES if planner.num_micro(m)), 1)
    ours = planner.workload.model if isinstance(planner.workload.model, LanguageModel) else None
    if ours is not None and ours.config.activation_checkpointing != "full":
        recomputing = planner.on(workload=planner.workload.changed({"activation_checkpointing": "full"}))
        if _fits(recomputing, stage, smallest):
            return f"{start}; activation checkpointing (full) with micro-batch {smallest} would fit."
        planner = recomputing
        start += ", too much with activation checkpointing as well"
    more = fewest_gpus(planner, stages, smallest)
    if more is not None:
        return f"{start}; {more:,} GPUs would fit, at {_stage_name(stage)} with micro-batch {smallest}."
    length = planner.workload.seq_len // 2
    while length >= 1 and ours is not None:
        shorter = planner.on(workload=planner.workload.changed(seq_len=length))
        if _fits(shorter, stage, smallest):
            return f"{start}; sequences of {length} tokens with micro-batch {smallest} would fit."
        length //= 2
    return f"{start}; no single change helps: take a larger GPU or a smaller model."


def fewest_gpus(
    planner: Planner, stages: Sequence[int | ShardingStrategy], micro_batch: int, most: int = 2**17
) -> int | None:
    """The smallest world where some of ``stages`` fits, in full nodes beyond the first; None: none up to ``most``."""
    per_node = planner.cluster.ranks_per_node

    def fits(world_size: int) -> bool:
        other = planner.on(world_size=world_size, global_batch=0)
        return any(_fits(other, stage, micro_batch) for stage in reversed(stages))

    low, high = 0, 1
    while not fits(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high - low > 1:  # fits at `high`, not at `low`
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high if high <= per_node else -(-high // per_node) * per_node


def _fits(planner: Planner, stage: int | ShardingStrategy, micro_batch: int) -> bool:
    return planner.num_micro(micro_batch) > 0 and planner.row(stage, micro_batch).fits


def _stage_name(stage: int | ShardingStrategy) -> str:
    return f"stage {stage}" if isinstance(stage, int) else "the given row"


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
