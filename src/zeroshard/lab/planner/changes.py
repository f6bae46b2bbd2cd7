"""What to change where no row of a plan fits, in the order in which one would try, each with its memory and time.

First what costs nothing but time on the same machine (a smaller micro-batch, activation checkpointing), then what
trains something else (adapters), then what costs money (a larger GPU, more GPUs), and last what changes the data
(shorter sequences).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from zeroshard.errors import UserError
from zeroshard.lab.planner.advice import GIB, MICRO_BATCHES, describe, recommended
from zeroshard.lab.planner.plan_rows import Row
from zeroshard.lab.planner.planner import Planner
from zeroshard.lab.planner.show import seconds
from zeroshard.models import LanguageModel
from zeroshard.models.adapters import Lora
from zeroshard.profiling.devices import DEVICES
from zeroshard.zero import ShardingStrategy

LORA_RANK = 16
Stages = Sequence[int | ShardingStrategy]


@dataclass(frozen=True)
class Change:
    """One change, with the row that it leads to.

    Attributes:
        name: the change in words, with the flag that makes it.
        planner: the planner of the changed job.
        row: the row to take after the change; the one that needs least if none fits.
        cost: what it costs besides; empty if nothing.
    """

    name: str
    planner: Planner
    row: Row
    cost: str = ""

    def __str__(self) -> str:
        row, world_size = self.row, self.planner.cluster.world_size
        if not row.fits:
            return f"{self.name} would not do: {row.needed_bytes / GIB:,.1f} GiB"
        how = describe(row, world_size)
        facts = [f"{row.needed_bytes / GIB:,.1f} GiB", f"{seconds(row.timing.step_s)} a step"]
        facts.append(f"{row.tokens_per_s:,.0f} tokens/s")
        return f"{self.name} would fit, at {how}: {', '.join(facts)}{self.cost and f'; {self.cost}'}"


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
    found = list(_changes(planner, stages, micro_batch))
    if not any(change.row.fits for change in found):
        return f"{start}; no single change helps: take a larger GPU or a smaller model."
    return "\n".join([f"{start}. What to change, in the order in which to try it:", *(f"  {each}" for each in found)])


def _changes(planner: Planner, stages: Stages, micro_batch: int | None) -> Iterator[Change]:
    ours = planner.workload.model if isinstance(planner.workload.model, LanguageModel) else None
    if micro_batch is not None and micro_batch > 1:
        yield from _change("a smaller micro-batch (leave --micro-batch out)", planner, stages)
    if planner.node_copy:
        yield from _change("no second copy of weights (leave --node-copy out)", planner.on(node_copy=0), stages)
    thrifty = planner
    if ours is not None and ours.config.activation_checkpointing != "full":
        thrifty = planner.on(workload=planner.workload.changed({"activation_checkpointing": "full"}))
        name = "activation checkpointing (--model.activation-checkpointing full)"
        yield from _change(name, thrifty, stages)
    if ours is not None and ours.lora is None and planner.workload.optimizer == "AdamW":
        cost = "it trains adapters of weights that must be there already"
        with suppress(UserError):  # what adds adapters, peft, is not installed
            with_adapters = planner.on(workload=planner.workload.changed(lora=Lora(LORA_RANK)))
            yield from _change(f"LoRA (--lora {LORA_RANK})", with_adapters, stages, cost)
    yield from _larger_gpu(planner, stages)
    yield from _more_gpus(planner, thrifty, stages)
    if ours is not None:
        yield from _shorter_sequences(thrifty, stages, "" if thrifty is planner else ", with activation checkpointing")


def _change(name: str, planner: Planner, stages: Stages, cost: str = "") -> Iterator[Change]:
    """The change with the row to take after it, if it can be planned at all."""
    row = _best_row(planner, stages)
    if row is not None:
        yield Change(name, planner, row, cost)


def _larger_gpu(planner: Planner, stages: Stages) -> Iterator[Change]:
    """The known device with the least memory on which a row fits."""
    now = planner.device
    if now.name not in DEVICES:
        return
    larger = [each for each in DEVICES.values() if each.memory_bytes > now.memory_bytes]
    larger = [each for each in larger if each.device_type == now.device_type]
    for device in sorted(larger, key=lambda each: each.memory_bytes):
        there = planner.on(device=device)
        if planner.workload.dtype in device.matmul_flops_per_s and _any_fits(there, stages):
            yield from _change(f"a larger GPU (--gpu {device.name})", there, stages)
            return


def _more_gpus(planner: Planner, thrifty: Planner, stages: Stages) -> Iterator[Change]:
    """The fewest GPUs with which a row fits, of this job or else with activation checkpointing."""
    for way, added in ((planner, ""), (thrifty, " and activation checkpointing")):
        smallest = next((m for m in MICRO_BATCHES if way.num_micro(m)), 1)
        more = fewest_gpus(way, stages, smallest)
        if more is not None:
            there = way.on(world_size=more, global_batch=0)
            yield from _change(f"{more:,} GPUs{added}", there, stages)
            return


def _shorter_sequences(planner: Planner, stages: Stages, added: str) -> Iterator[Change]:
    smallest = next((m for m in MICRO_BATCHES if planner.num_micro(m)), 1)
    length = shorter_sequences(planner, stages[-1], smallest)
    if length is not None:
        there = planner.on(workload=planner.workload.changed(seq_len=length))
        yield from _change(f"sequences of {length} tokens (--seq-len {length}){added}", there, stages)


def _best_row(planner: Planner, stages: Stages) -> Row | None:
    """The row to recommend; if none fits, the one that needs least; None if no row can be planned."""
    rows: list[Row] = []
    try:
        for stage in stages if planner.cluster.world_size > 1 else stages[:1]:
            for micro_batch in filter(planner.num_micro, MICRO_BATCHES):
                rows.append(planner.row(stage, micro_batch))
                if not rows[-1].fits:
                    break
    except UserError:
        return None
    return recommended(rows) or min(rows, key=lambda row: row.needed_bytes, default=None)


def _any_fits(planner: Planner, stages: Stages) -> bool:
    smallest = next((m for m in MICRO_BATCHES if planner.num_micro(m)), 1)
    return any(_fits(planner, stage, smallest) for stage in reversed(stages))


def shorter_sequences(planner: Planner, stage: int | ShardingStrategy, micro_batch: int) -> int | None:
    """The longest sequence length that fits among a half, a quarter, ... of the workload's; None if none does."""

    def fits(length: int) -> bool:
        return _fits(planner.on(workload=planner.workload.changed(seq_len=length)), stage, micro_batch)

    lengths = [planner.workload.seq_len >> times for times in range(1, planner.workload.seq_len.bit_length())]
    if not lengths or not fits(lengths[-1]):  # checked first, to save the traces of longer ones
        return None
    return next(length for length in lengths if fits(length))


def fewest_gpus(
    planner: Planner, stages: Sequence[int | ShardingStrategy], micro_batch: int, most: int = 2**17
) -> int | None:
    """The smallest world size up to ``most``, in full nodes beyond the first, at which a stage fits, or None."""
    per_node = planner.cluster.ranks_per_node

    def in_full_nodes(world_size: int) -> int:
        """Round up to full nodes, among which a second copy of weights can be divided."""
        return world_size if world_size <= per_node else -(-world_size // per_node) * per_node

    def fits(world_size: int) -> bool:
        other = planner.on(world_size=in_full_nodes(world_size), global_batch=0)
        return any(_fits(other, stage, micro_batch) for stage in reversed(stages))

    if not fits(most):  # a rank needs no more memory in a larger world
        return None
    low, high = 0, 1
    while not fits(high):
        low, high = high, high * 2
    while high - low > 1:  # fits at `high`, not at `low`
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return in_full_nodes(high)


def _fits(planner: Planner, stage: int | ShardingStrategy, micro_batch: int) -> bool:
    if planner.num_micro(micro_batch) == 0 or planner.cannot_fit(stage, micro_batch):
        return False
    return planner.row(stage, micro_batch).fits
