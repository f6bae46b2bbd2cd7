"""What to change where no row of a plan fits, in the order in which one would try, each with its memory and time.

First what costs nothing but time on the same machine (a smaller micro-batch, and the levers of
`zeroshard.lab.planner.levers`, the cheapest first), then what
trains something else (adapters), then what costs money (a larger GPU, more GPUs), and last what changes the data
(shorter sequences).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from zeroshard.errors import UserError
from zeroshard.lab.planner.advice import GIB, MICRO_BATCHES, describe, recommended
from zeroshard.lab.planner.levers import levers, off_the_device
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import Lora
from zeroshard.train.profiling.devices import DEVICES
from zeroshard.zero import ShardingStrategy

LORA_RANK = 16
MOST_GPUS = 2**17
Stages = Sequence[int | ShardingStrategy]
Change = tuple[str, Planner, str]  # in words with the flag that makes it, the changed job, and what it costs besides


def changes_that_fit(planner: Planner, stages: Stages, micro_batch: int | None, rows: Sequence[Row]) -> str:
    """Say that nothing fits, and list the changes that would make a row fit, a line each.

    Args:
        planner: the planner of the rows.
        stages: the stages that were planned.
        micro_batch: the requested micro-batch; None: any.
        rows: the rows, none of which fits.
    """
    best = min(rows, key=lambda row: row.needed_bytes)
    gib = f"{best.needed_bytes / GIB:,.1f} GiB where {planner.device.memory_bytes / GIB:.1f} are"
    if best.headroom_bytes >= 0:
        gib += f" and {planner.headroom:.0%} must stay free"
    start = f"Nothing fits: {describe(best, planner.cluster.world_size)} needs {gib}"
    found = [(change, _best_row(change[1], stages)) for change in _changes(planner, stages, micro_batch)]
    planned = [(change, row) for change, row in found if row is not None]
    if not any(row.fits for _, row in planned):
        return f"{start}; no single change helps: take a larger GPU or a smaller model."
    lines = [f"  {_in_words(change, row)}" for change, row in planned]
    return "\n".join([f"{start}. What to change, in the order in which to try it:", *lines])


def _in_words(change: Change, row: Row) -> str:
    name, planner, cost = change
    if row.fits_device and not row.fits:
        return f"{name} would not do: {row.node_host_bytes / GIB:,.0f} GiB of host memory a node"
    if not row.fits:
        return f"{name} would not do: {row.needed_bytes / GIB:,.1f} GiB"
    off = row.offloaded
    if off.fraction and not cost:
        cost = f"{off.host_bytes * off.ranks_per_node / GIB:,.0f} GiB of host memory a node"
    facts = f"{row.needed_bytes / GIB:,.1f} GiB, {seconds(row.timing.step_s)} a step, {row.tokens_per_s:,.0f} tokens/s"
    return f"{name} would fit, at {describe(row, planner.cluster.world_size)}: {facts}{cost and f'; {cost}'}"


def _changes(planner: Planner, stages: Stages, micro_batch: int | None) -> Iterator[Change]:
    workload, model = planner.workload, planner.workload.model
    ours = model if isinstance(model, LanguageModel) else None
    if micro_batch is not None and micro_batch > 1:
        yield "a smaller micro-batch (leave --micro-batch out)", planner, ""
    if planner.node_copy:
        yield "no second copy of weights (leave --node-copy out)", planner.on(node_copy=0), ""
    thrifty, added = planner, ""
    pulled: tuple[str, ...] = ()
    for lever in levers(planner):
        also = " with " + " ".join(pulled) if pulled else ""
        yield f"{lever.what} ({lever.flag}){also}", lever.planner, ""
        flag = lever.flag.partition(" ")[0]
        pulled = (*(each for each in pulled if not each.startswith(flag)), lever.flag)
        if lever.flag.endswith(" full"):
            thrifty, added = lever.planner, "checkpointing"
    for lever in off_the_device(thrifty):
        yield f"{lever.what} ({lever.flag})" + (f" and activation {added}" if added else ""), lever.planner, ""
    if ours is not None and ours.lora is None and workload.optimizer == "AdamW":
        with suppress(UserError):  # what adds adapters, peft, is not installed
            adapters = planner.on(workload=workload.changed(lora=Lora(LORA_RANK)))
            yield f"LoRA (--lora {LORA_RANK})", adapters, "it trains adapters of weights that must be there already"
    for device in sorted(DEVICES.values(), key=lambda each: each.memory_bytes):
        larger = planner.device.name in DEVICES and device.memory_bytes > planner.device.memory_bytes
        if larger and device.device_type == planner.device.device_type:
            there = planner.on(device=device)
            fits = (_fits(there, stage, _smallest(there)) for stage in reversed(stages))
            if workload.dtype in device.matmul_flops_per_s and any(fits):
                yield f"a larger GPU (--gpu {device.name})", there, ""
                break
    for way, also in ((planner, ""), (thrifty, f" and activation {added}")):
        # GPUs that share sequences come in groups, which the search does not know
        more = fewest_gpus(way, stages, _smallest(way)) if workload.sequence_parallel == 1 else None
        if more is not None:
            yield f"{more:,} GPUs{also}", way.on(world_size=more, global_batch=0), ""
            break
    if ours is not None:
        shorter = _shorter_sequences(thrifty, stages[-1])
        if shorter is not None:
            length = shorter.workload.seq_len
            with_added = f", with activation {added}" if added else ""
            yield f"sequences of {length} tokens (--seq-len {length}){with_added}", shorter, ""


def _shorter_sequences(planner: Planner, stage: int | ShardingStrategy) -> Planner | None:
    """The job with the longest sequences that fit among a half, a quarter, ... of its own; None if none do."""

    def at(length: int) -> Planner | None:
        there = planner.on(workload=planner.workload.changed(seq_len=length))
        return there if _fits(there, stage, _smallest(planner)) else None

    seq_len, share = planner.workload.seq_len, planner.workload.sequence_parallel
    lengths = [seq_len >> times for times in range(1, seq_len.bit_length()) if (seq_len >> times) % share == 0]
    if not lengths or at(lengths[-1]) is None:  # checked first, to save the traces of longer ones
        return None
    return next(filter(None, map(at, lengths)))


def _best_row(planner: Planner, stages: Stages) -> Row | None:
    """The row to recommend; if none fits, the one that needs least; None if no row can be planned."""
    rows: list[Row] = []
    try:
        for stage in stages if planner.stages_differ else stages[:1]:
            for micro_batch in filter(planner.num_micro, MICRO_BATCHES):
                rows.append(planner.row(stage, micro_batch))
                if not rows[-1].fits:
                    break
    except UserError:
        return None
    return recommended(rows) or min(rows, key=lambda row: row.needed_bytes, default=None)


def fewest_gpus(planner: Planner, stages: Stages, micro_batch: int) -> int | None:
    """The smallest world size up to `MOST_GPUS`, in full nodes beyond the first, at which a stage fits, or None."""
    per_node = planner.cluster.ranks_per_node

    def in_full_nodes(world_size: int) -> int:
        """Round up to full nodes, among which a second copy of weights can be divided."""
        return world_size if world_size <= per_node else -(-world_size // per_node) * per_node

    def fits(world_size: int) -> bool:
        other = planner.on(world_size=in_full_nodes(world_size), global_batch=0)
        return any(_fits(other, stage, micro_batch) for stage in reversed(stages))

    in_blocks = planner.workload.states[0].block > 1  # whose padding may need more memory in a larger world
    if not in_blocks and not fits(MOST_GPUS):
        return None
    low, high = 0, 1
    while not fits(high):
        low, high = high, high * 2
        if high > MOST_GPUS:
            return None
    while high - low > 1:  # fits at `high`, not at `low`
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return in_full_nodes(high)


def _smallest(planner: Planner) -> int:
    return next((size for size in MICRO_BATCHES if planner.num_micro(size)), 1)


def _fits(planner: Planner, stage: int | ShardingStrategy, micro_batch: int) -> bool:
    return planner.num_micro(micro_batch) > 0 and planner.row(stage, micro_batch).fits
